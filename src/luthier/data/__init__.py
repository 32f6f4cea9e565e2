"""Rows to samples to global batches."""
