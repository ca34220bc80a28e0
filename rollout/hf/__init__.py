"""The one door to Hugging Face transformers. Imports nothing itself; see `transformers.py`."""
