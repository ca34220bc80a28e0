"""Transfer of weights from the trainer to the engines: packing, digests, shared memory, quantisation."""
