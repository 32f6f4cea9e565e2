"""Luthier fine-tunes any Hugging Face causal language model, exactly."""

__version__ = "0.1.0"
