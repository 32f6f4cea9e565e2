"""Fields of a source whose rows have images."""

from __future__ import annotations

import os.path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


class ImageFields(BaseModel):
    """Part of a source's section."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    image_column: str | None = None
    """The column that holds a row's images: paths, bytes or addresses, one or a list; images or image when left out."""
    image_root: Annotated[str, Field(min_length=1), AfterValidator(os.path.expanduser)] | None = None
    """Directory that paths of images start from and stay in; the data file's own when left out."""
    allow_urls: bool = False
    """Fetch images that rows name by http or https; each once, while rows are tokenised."""
