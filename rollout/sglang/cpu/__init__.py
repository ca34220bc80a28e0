"""Code that runs inside SGLang's processes on a CPU: its platform, attention in batches, seeded draws."""
