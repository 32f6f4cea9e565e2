"""Models that see: their processor, rows with images, debug models of the kind."""
