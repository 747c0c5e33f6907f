"""The grid of ranks, the process groups made from it, and streams of random numbers."""
