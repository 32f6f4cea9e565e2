"""One run of a model's backbone over a packed batch, and the proof at set-up that packing changes nothing."""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from luthier.batch import Batch, Sample
from luthier.errors import first_line
from luthier.hf.anatomy import backbone_name
from luthier.hf.head import head_logits
from luthier.hf.raised import RAISED_BY_MODELS
from luthier.hf.routing import counted
from luthier.hf.rows.attention import takes_attention
from luthier.hf.rows.documents import Documents, documents
from luthier.hf.rows.virtual import lengthened, plainly, virtual_of

_log = logging.getLogger(__name__)


def hidden_states(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """What the backbone makes of a packed batch, each document seeing itself alone.

    Args:
        model: a causal language model; its head is not run.
        batch: T positions, on the model's device.

    Returns:
        [T, hidden], what the model's head reads.
    """
    backbone = getattr(model, backbone_name(model))
    arguments: dict[str, Any] = {"position_ids": batch.position_ids, "use_cache": False}
    kept = None
    if (virtual := virtual_of(model)) is not None:
        batch, kept = lengthened(batch, virtual)
        arguments["position_ids"] = batch.position_ids
        if virtual.prepare is not None:
            virtual.prepare(model)
    if batch.parents:
        # without a mask Transformers would take the second answer to a prompt for a document of its own
        arguments["attention_mask"] = torch.ones_like(batch.input_ids, dtype=torch.bool)
    accepted = _accepted(type(backbone).forward)
    if accepted is not None:
        arguments = {name: value for name, value in arguments.items() if name in accepted}
    if batch.sights is not None:
        arguments |= _seen(batch, backbone)
    with documents(Documents.of(batch.cu_seqlens, batch.parents), told=not masks_itself(model)), counted(batch):
        output = backbone(input_ids=batch.input_ids, **arguments)
    hidden = output[0]
    assert isinstance(hidden, torch.Tensor)
    return hidden[0] if kept is None else hidden[0, kept]


def _seen(batch: Batch, backbone: Any) -> dict[str, Any]:
    """What the backbone reads of a batch's pictures, and the positions of its tokens.

    Alone in its row a document gets these from the model, some of which lay them out over a picture in two dimensions.
    Of several such documents each is laid out on its own: [4, 1, T], the first of them those of text.
    """
    assert batch.sights is not None
    device = batch.input_ids.device
    seen = {name: value.to(device) for name, value in batch.sights().items()}
    if batch.documents == 1:
        return {"position_ids": None, **seen}
    if not hasattr(backbone, "get_rope_index"):
        return seen
    kinds, sizes = seen.pop("mm_token_type_ids"), iter(seen["image_grid_thw"])  # [1, T], [pictures, 3]
    laid = []
    for start, stop in itertools.pairwise(batch.cu_seqlens.tolist()):
        own = kinds[:, start:stop]
        pictures = int(((own[0, 1:] == 1) & (own[0, :-1] != 1)).sum() + (own[0, 0] == 1))
        grid = torch.stack(list(itertools.islice(sizes, pictures))) if pictures else None
        laid.append(
            backbone.get_rope_index(batch.input_ids[:, start:stop], mm_token_type_ids=own, image_grid_thw=grid)[0]
        )
    return {**seen, "position_ids": torch.cat([batch.position_ids[None], torch.cat(laid, -1)])}


def masks_itself(model: PreTrainedModel) -> bool:
    """Whether a model works on its attention masks before attention sees them, so that "luthier" cannot stand there;
    `packing_is_exact` finds out."""
    return bool(vars(model).get(_MASKS_ITSELF, False))


def let_mask_itself(model: PreTrainedModel) -> None:
    """Give a model the attention that Transformers would, and no word of documents but their positions."""
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    vars(model)[_MASKS_ITSELF] = True


_MASKS_ITSELF = "luthier_masks_itself"


@functools.cache
def _accepted(forward: Callable[..., Any]) -> frozenset[str] | None:
    """Names of the arguments that a backbone's forward takes; None = any."""
    parameters = inspect.signature(forward).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return frozenset(parameters)


_PROBE_LENGTHS = (5, 11, 3)
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Root mean square of the difference over that of the logits' spread; wrong positions or masks make it about 1, and
real models in bf16 differ from themselves by 0.05 on tokens that mean nothing."""


def packing_is_exact(model: PreTrainedModel) -> tuple[bool, str]:
    """Whether documents of one row stay apart in this model, tried on three short ones.

    Two proofs: no gradient flows from one document's hidden states to another's tokens (exactly zero, in any
    precision), and each document's logits are those that the model's plain forward gives it alone.

    Args:
        model: loaded, on its device. Its mode, gradients and `requires_grad` are left as they were; one that cannot
            run with the attention "luthier" gets Transformers' own.

    Returns:
        (True, "") or (False, the reason as a clause: "its documents see one another").
    """
    with plainly(model):
        return _packing_is_exact(model)


def _packing_is_exact(model: PreTrainedModel) -> tuple[bool, str]:
    batch = _probe(model)
    training = model.training
    model.eval()
    try:
        try:
            return _try_packing(model, batch)
        except RAISED_BY_MODELS as error:  # an architecture that works on its masks itself
            if not takes_attention(type(model)):
                raise
            # perhaps Transformers tells documents apart by their positions
            _log.info("%s takes Transformers' own attention: %s", type(model).__name__, first_line(error))
            let_mask_itself(model)
            return _try_packing(model, batch)
    except RAISED_BY_MODELS as error:  # it cannot be packed
        return False, f"its forward refuses a packed row ({first_line(error)})"
    finally:
        model.train(training)


def _try_packing(model: PreTrainedModel, batch: Batch) -> tuple[bool, str]:
    leak = _leaks(model, batch)
    return (False, leak) if leak else _same_alone(model, batch)


def _probe(model: PreTrainedModel) -> Batch:
    """Three documents of tokens that the model knows."""
    embedding = model.get_input_embeddings().weight
    assert isinstance(embedding, torch.Tensor)
    random = np.random.default_rng(0)
    samples = []
    for length in _PROBE_LENGTHS:
        ids = random.integers(0, embedding.shape[0], length + 1)
        samples.append(Sample.from_ids(ids, np.ones(length + 1)))
    return Batch.pack(samples).to(embedding.device)


def _leaks(model: PreTrainedModel, batch: Batch) -> str:
    """The reason why documents are not apart, or "" if no gradient crosses from one to another."""
    caught: list[torch.Tensor] = []

    def catch(module: nn.Module, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        caught.append(output.detach().requires_grad_(True))
        return caught[-1].clone()  # some architectures scale it in place

    handle = model.get_input_embeddings().register_forward_hook(catch)
    flags = {parameter: parameter.requires_grad for parameter in model.parameters()}
    try:
        for parameter in flags:
            parameter.requires_grad_(False)
        with torch.enable_grad():
            hidden = hidden_states(model, batch)
            bounds = batch.cu_seqlens.tolist()
            for start, stop in itertools.pairwise(bounds):
                grad = torch.autograd.grad(hidden[start:stop].float().sum(), caught[0], retain_graph=True)[0][0]
                outside = torch.cat([grad[:start], grad[stop:]])
                if bool((outside != 0).any()):
                    return "its documents see one another in a packed row"
    finally:
        handle.remove()
        for parameter, flag in flags.items():
            parameter.requires_grad_(flag)
    return ""


@torch.no_grad()
def _same_alone(model: PreTrainedModel, batch: Batch) -> tuple[bool, str]:
    """Compare each packed document's logits with those of the model's own forward on it alone."""
    packed = head_logits(model, hidden_states(model, batch)).double()
    bounds = batch.cu_seqlens.tolist()
    worst = 0.0
    for start, stop in itertools.pairwise(bounds):
        alone = model(input_ids=batch.input_ids[:, start:stop], use_cache=False).logits[0].double()
        spread = (alone - alone.mean(-1, keepdim=True)).square().mean().clamp(min=1e-18)
        worst = max(worst, float(((packed[start:stop] - alone).square().mean() / spread).sqrt()))
    if worst > TOLERANCE.get(model.dtype, TOLERANCE[torch.bfloat16]):
        return False, f"its logits differ by {worst:.1e} between packed documents and each alone"
    return True, ""
