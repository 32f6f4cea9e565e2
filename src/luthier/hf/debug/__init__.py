"""Tiny random models of any type, for tests, dry runs and trials at set-up."""
