"""Engines in Ray actors behind one handle: balance, care, residency. `engine_group.py` is the handle."""
