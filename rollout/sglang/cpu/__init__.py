"""Code for SGLang's processes on a CPU: a platform, attention of decode steps in batches, seeded draws."""
