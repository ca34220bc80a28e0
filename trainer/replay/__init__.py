"""Steps that are written down while a run trains, and scored again afterwards under every correction."""
