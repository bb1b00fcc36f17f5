"""Costs of operators: time, and bytes beside their outputs.

In: a graph's kinds of operators, and a device or a target. Out: `Costs`, measured or estimated and never mixed, and the
`Profile` of both, as a file.
"""
