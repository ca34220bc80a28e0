"""The form in which weights travel from the trainer to the engines: buckets, digests, shared memory, grids."""
