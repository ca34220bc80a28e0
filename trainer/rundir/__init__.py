"""The files of a run directory: checkpoints, dumps, rows, provenance and events, and what a resume reads."""
