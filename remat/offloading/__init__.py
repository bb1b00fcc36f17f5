"""Offload storages to the host between forward and backward, as a plan chooses them.

A plan of regions and a target's link come in; offloads with their planned nodes come out, and a bound over all of them.
"""
