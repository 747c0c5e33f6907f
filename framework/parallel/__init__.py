"""Changes that spread the plain model over ranks. Read apply.py first: the order is fixed there."""
