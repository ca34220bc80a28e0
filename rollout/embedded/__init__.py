"""What engines in the process of their worker share: the thread that samples, requests, draws, the order of a sync."""
