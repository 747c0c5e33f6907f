"""What is measured of a run, and where it is shown, written and sent."""
