"""Descriptions of the training: the workload, its optimizer, the loop around the step, the target.

In: what a person names (a model, a batch, a step, a dtype policy; `h100-80gb`).
Out: a `Workload`, a `TrainingLoop`, a `Target`.
"""
