"""The step's batch, as it crosses from the driver to the ranks: packed micro-batches and how they are planned."""
