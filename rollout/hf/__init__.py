"""The only door to Hugging Face transformers. This file imports nothing; see `transformers.py`."""
