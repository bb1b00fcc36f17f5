"""Captured graphs whose regions are tags for a compiler: Inductor, or AOTAutograd alone."""
