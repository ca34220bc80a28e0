"""The files of a run directory: checkpoints, dumps, provenance, events, and how a run ends and goes on."""
