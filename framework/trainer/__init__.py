"""Assembly and the loop: build.py puts a run together, loop.py drives it."""
