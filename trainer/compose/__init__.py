"""Recipe + overrides -> TrainConfig. No other package composes with Hydra; `compose.py` is the entry."""
