"""The files of a run directory: checkpoints, dumps, provenance and events, and the end and resumption of a run."""
