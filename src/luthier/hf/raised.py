"""What the code of an architecture raises when it is called in a way that its authors did not think of."""

from __future__ import annotations

from huggingface_hub.errors import StrictDataclassError

from luthier.errors import ModelError

RAISED_BY_MODELS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    ModelError,
    NameError,
    RuntimeError,
    StopIteration,
    StrictDataclassError,
    TypeError,
    ValueError,
)
"""For trials, in which a model that cannot do something says so by failing, and for what a file of its makers asks for.

Torch's errors are RuntimeErrors, those of configs StrictDataclassErrors, those of our own parts ModelErrors. A file
that cannot be read, or a lack of memory, says nothing of an architecture.
"""
