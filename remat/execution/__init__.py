"""How a plan's step runs: one folder a way, and `executions.py`, the table of them.

In: a plan and a model (training), or a plan and a step on fakes (planning, validation). Out: the model's own forward
with regions in it, or the bytes that it takes. Training loads nothing that makes or judges plans.
"""
