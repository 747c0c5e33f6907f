"""Before the run: what each rank will hold, how long a step will take, and which layout to choose. No torch."""
