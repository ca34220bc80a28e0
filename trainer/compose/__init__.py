"""Recipe + overrides -> TrainConfig. Hydra ends here; `compose.py` is the entry."""
