"""`python -m luthier`."""

from luthier.cli.main import entrance

if __name__ == "__main__":
    entrance()
