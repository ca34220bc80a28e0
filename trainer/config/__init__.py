"""Configuration of a run: dataclasses of the trainer and their rules; `train.py` composes the whole. No torch."""
