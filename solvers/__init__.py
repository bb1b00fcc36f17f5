"""Solvers: each file is one strategy or formulation, and every one has the same shape.

`solve(problem, limits) -> Solution`. A solver chooses among the plans of the problem's space; it promises nothing
about memory that `remat.check` has not seen.
"""

from __future__ import annotations
