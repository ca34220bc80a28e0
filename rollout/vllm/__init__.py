"""vLLM's engine in the worker's process: how it is started, drawn from, loaded and read back."""
