"""Tinker's HTTP surface: one async process that keeps order and books, and one worker process that computes."""
