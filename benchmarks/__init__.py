"""Benchmarks: commands that measure what README and the issues claim, and write it to `results/`.

Run one with `python -m benchmarks NAME`; `make bench` runs all. Nothing in `results/` is written by hand.
"""
