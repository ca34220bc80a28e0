"""The numbers that `parity simulate` stands on."""
