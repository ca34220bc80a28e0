"""Files of other trainers that hold a step with both log-probs, read as bundles: one file per format."""
