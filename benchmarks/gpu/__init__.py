"""The stages of `benchmarks/device.py`: each measures something on a GPU, in processes of its own."""
