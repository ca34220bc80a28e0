"""The step's batch between driver and ranks: packed micro-batches and their planning."""
