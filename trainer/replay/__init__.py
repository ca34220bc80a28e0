"""Steps that were written down while a run trained, scored again under every correction."""
