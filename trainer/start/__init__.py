"""What is asked of the machine, the model, the data and user code before a run starts."""
