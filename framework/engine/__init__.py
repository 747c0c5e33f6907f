"""Engines: one optimizer step over a batch, on DeepSpeed or on nothing but torch."""
