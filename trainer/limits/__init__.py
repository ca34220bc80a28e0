"""Limits of model and hardware: sizes, memory plan, ceilings, and the minimum seconds of each phase."""
