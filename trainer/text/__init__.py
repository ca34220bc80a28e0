"""Text that a run writes: printable, without secrets, and YAML."""
