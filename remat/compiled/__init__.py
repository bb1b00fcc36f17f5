"""Compiled training under a budget: the choice made inside the compiler's partitioner."""
