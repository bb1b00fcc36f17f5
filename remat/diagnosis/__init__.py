"""Diagnosis: what a run did to a card's memory, laid beside what its plan promised.

In: a snapshot of PyTorch's caching allocator, the Plan, and the Profile of its step. Out: Findings, which name the
difference. No torch is needed, so a snapshot is read wherever it was copied to.
"""
