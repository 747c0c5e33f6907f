"""What every room may lean on: errors, the log, safe writing of files."""
