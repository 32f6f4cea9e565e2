"""The one training step and all that it needs."""
