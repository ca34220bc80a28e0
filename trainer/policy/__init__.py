"""One FSDP rank: the model, its step, its optimizer, its critic. `worker.py` is what the group calls."""
