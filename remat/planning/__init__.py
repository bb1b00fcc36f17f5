"""From a workload and a budget to a plan, and to all that is asked with plans: compare, sweep, fit, estimate, advise.

In: a workload, a device, a budget. Out: a `Plan` that was solved, checked and replayed, or why there is none.
"""
