"""A number for a text: a score beside a causal language model's head, and the class of Transformers that has it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, PreTrainedModel

from luthier.errors import ConfigError, ModelError
from luthier.hf.anatomy import backbone_name
from luthier.hf.gather import plain_class
from luthier.hf.load import build_on_meta

SCORE = "score"
"""What Transformers calls the linear layer of its `ForSequenceClassification` models."""


def classifier_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """The class that `AutoModelForSequenceClassification` takes for a model's config.

    Raises:
        ModelError: there is none with the same backbone and a score after it.
    """
    found: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(model.config), None)
    what, remedy = f"{plain_class(model).__name__} has no kin that gives a score", "choose another model"
    if found is None:
        raise ModelError(what, where="method", remedy=remedy)
    cls: type[PreTrainedModel] = found
    plain = build_on_meta(cls, _config(model, 0))
    score = getattr(plain, SCORE, None)
    if plain.base_model_prefix != backbone_name(model) or not isinstance(score, nn.Linear) or score.bias is not None:
        raise ModelError(f"{what} of the same backbone and one matrix", where="method", remedy=remedy)
    return cls


def attach_score(model: PreTrainedModel, seed: int) -> None:
    """Give a loaded model a score, which trains; its head, unless it is the embedding too, trains no more.

    Args:
        model: loaded; on a layout of data ranks this rank's part of it, beside which the score is whole.
        seed: of the score's first values, drawn as Transformers draws those of a linear layer.

    Raises:
        ModelError: as of `classifier_class`.
        ConfigError: an adapter is to train the head, of which nothing would be learnt or written.
    """
    classifier_class(model)
    _refuse_training_the_head(model)
    text = model.config.get_text_config()
    first = torch.empty(1, text.hidden_size, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    first.normal_(0.0, float(getattr(text, "initializer_range", 0.02)), generator=generator)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    score = nn.Linear(text.hidden_size, 1, bias=False, device=model.device, dtype=model.dtype)
    with torch.no_grad():
        score.weight.copy_(first)
    model.add_module(SCORE, score)
    if head is not None and head.weight is not embedding.weight:
        head.requires_grad_(False)


def _refuse_training_the_head(model: PreTrainedModel) -> None:
    head = model.get_output_embeddings()
    name = next((name for name, module in model.named_modules() if module is head), "")
    adapted = getattr(head, "lora_spec", None) is not None
    if adapted or name in getattr(model, "lora_trained", ()):
        raise ConfigError(
            f"{name} writes text, and a reward model has a score in its place",
            where="adapter.target" if adapted else "adapter.train_modules",
            remedy="leave it out",
        )


def last_place(ids: list[int], padding: int) -> int:
    """Which token of a text its score is of: the last that is no padding, as Transformers finds it.

    >>> last_place([5, 6, 0], 0), last_place([0, 0], 0)
    (1, 0)
    """
    return max((place for place, token in enumerate(ids) if token != padding), default=0)


def padding_of(tokenizer: Any) -> int:
    """The id that fills rows up: the tokenizer's own, else that of its end.

    Raises:
        ModelError: it has neither.
    """
    for found in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if isinstance(found, int):
            return found
    raise ModelError("the tokenizer has neither padding nor an end", where="tokenizer", remedy="give it a pad_token")


def as_classifier(model: Any, padding: int) -> Any:
    """A model of Transformers' class for sequence classification over the very same backbone and score."""
    view = build_on_meta(classifier_class(model), _config(model, padding))
    setattr(view, view.base_model_prefix, getattr(model, backbone_name(model)))
    setattr(view, SCORE, getattr(model, SCORE))
    trained = tuple(getattr(model, "lora_trained", ()))
    vars(view)["lora_trained"] = (*trained, SCORE)
    return view


def _config(model: Any, padding: int) -> Any:
    config = copy.deepcopy(model.config)
    config.num_labels = 1
    config.get_text_config().pad_token_id = config.pad_token_id = padding
    return config
