"""Configuration of a run: every dataclass and every rule. `train.py` puts the parts together. No torch."""
