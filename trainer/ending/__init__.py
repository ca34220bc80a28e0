"""What asks a run to end: signals, the time limit of a job."""
