"""Code for SGLang's processes on a CPU: a platform, attention in batches, seeded draws."""
