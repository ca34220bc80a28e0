"""What engines and policy share of a Hugging Face model, so that both refuse and compute the same."""
