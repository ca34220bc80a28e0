"""Transfer of weights from the trainer to the engines: buckets, digests, shared memory, broadcast, quantisation."""
