"""Settings: every one once, how they are composed, and which do not go together."""
