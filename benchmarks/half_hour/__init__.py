"""Half an hour of a GPU; `benchmarks/device.py` is the command.

`runner.py` starts the parts, each in a process of its own, and knows nothing of torch. `findings.py` is where a part
puts what it found. `parts.py` has the parts, `observing.py` what they watch, `carried.py` the plans made beforehand.
"""
