"""A row becomes samples: one file per format."""

from luthier.data.formats.base import Format
from luthier.data.formats.detect import detect, make_format

__all__ = ["Format", "detect", "make_format"]
