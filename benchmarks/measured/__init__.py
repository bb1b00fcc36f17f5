"""Kernels that others measured, read from where a person puts them: a module for each source."""
