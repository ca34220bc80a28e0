"""Arithmetic in which a token has the same bits in any company: one forward for the trainer and the embedded engine."""
