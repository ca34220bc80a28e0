"""Limits of model and hardware: sizes, memory plan, ceilings, and the least seconds of each phase."""
