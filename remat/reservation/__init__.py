"""Simulate CUDA's caching allocator for a step, without torch and without CUDA.

In: lives of storages, and the allocator's settings. Out: bytes requested, allocated and reserved.
"""
