"""Offload: of what a plan keeps from forward to backward, what lies on the host meanwhile.

A plan of regions and a target's link come in; offloads with their planned nodes come out, and a bound over all of them.
"""
