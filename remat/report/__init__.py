"""Report: a plan as one page that a person looks at.

In: a Plan, the Profile of its step, and what `sweep`, `compare`, `validate` and `timeline` wrote as JSON. Out: the text
of one HTML file that needs nothing beside it.
"""
