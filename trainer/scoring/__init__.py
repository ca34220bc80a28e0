"""A micro-batch -> log-probs and entropy of its response tokens, in a decoder of transformers."""
