"""A path becomes rows: dicts, each with the file and line it came from."""

from luthier.data.sources.find import find_files
from luthier.data.sources.origin import Origin
from luthier.data.sources.read import RawRow, files_of, read_file, read_rows

__all__ = ["Origin", "RawRow", "files_of", "find_files", "read_file", "read_rows"]
