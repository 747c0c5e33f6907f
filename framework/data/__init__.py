"""From token files to the micro-batches of each step: tokens, order, stream, prepare."""
