"""A verb each, one readable file each."""
