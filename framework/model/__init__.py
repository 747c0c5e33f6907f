"""The plain single-device decoder: what every parallel form is held against."""
