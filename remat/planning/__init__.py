"""From a workload and a budget to a plan; also compare, sweep, fit, estimate and advise.

In: a workload, a device, a budget. Out: a `Plan` that was solved, checked and replayed, or why there is none.
"""
