"""The processes of a run: Ray and placement, the group of ranks, and the weight sync to the engines."""
