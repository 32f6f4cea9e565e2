"""The HTTP surface, a file for each part of it."""
