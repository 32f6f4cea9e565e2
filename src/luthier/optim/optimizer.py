"""One optimizer for all rules, all dtypes and whatever mixture of them a model has.

Weights are updated piece by piece, each piece small enough for the processor's cache, so that widening, clipping, the
rule itself and rounding pass over memory once. docs/decisions/0001-bf16-weights.md says how bf16 weights are kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from luthier.errors import CheckpointError, UserError
from luthier.optim import eight_bits
from luthier.optim.eight_bits import BLOCK, SCALE, eight_bit_states, has_eight_bits
from luthier.optim.rounding import join, split, stochastic_round
from luthier.optim.rules import RULES, Rule, States

_REMAINDER = "remainder"
# Elements in a piece: what a core's cache holds on a CPU; elsewhere a bound on temporary memory.
_CPU_PIECE = 1 << 18
_DEVICE_PIECE = 1 << 24


@dataclass(slots=True)
class _Piece:
    """Part of a parameter, flat, or for rules that need whole matrices all of it."""

    weight: Tensor
    gradient: Tensor
    states: dict[str, Tensor]
    step: int


class Optimizer(torch.optim.Optimizer):
    """Updates parameters by the rule of their group.

    All states exist from the start, so that a checkpoint before the first step holds them, and memory shows before
    training. `state[p]["step"]` is a plain int: how often this parameter has been updated.

    Args:
        groups: dictionaries with `params` as (name, parameter) pairs, `rule` (a key of `RULES`), `lr`, `weight_decay`
            and what the rule needs, `rounding` of bf16 weights ("remainder": the exact fp32 weight is kept as the bf16
            one and 16 bits more; "stochastic": bf16 is all there is) and `state_dtype` ("fp32" or "bf16", the dtype of
            moments of bf16 weights; those of wider weights have the weights' dtype; "int8": `eight_bits`).
        seed: of stochastic rounding. The bits come from it, the step and the place in the model alone, so other uses
            of randomness change nothing, replicas agree, and a resumed run goes on with the same bits.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], *, seed: int = 0) -> None:
        self._names: dict[Tensor, str] = {}
        self._ordinals: dict[Tensor, int] = {}
        self._seed = seed
        plain = []
        for group in groups:
            self._names.update({parameter: name for name, parameter in group["params"]})
            plain.append({**group, "params": [p for _, p in group["params"]], "initial_lr": group["lr"]})
        super().__init__(plain, {})
        for group in self.param_groups:
            rule = RULES[group["rule"]]
            for parameter in group["params"]:
                self._refuse_parts(parameter, rule, group["rule"])
                self.state[parameter] = _new_states(parameter, rule, group, self._names[parameter])

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], Tensor] | None = None,
        *,
        gradient_factor: float | Tensor = 1.0,
        only: Tensor | None = None,
    ) -> Tensor | None:
        """Update every parameter that has a gradient; gradients may be of any floating dtype and stay as they are.

        Args:
            closure: computes the loss again, as torch allows; its result is returned.
            gradient_factor: multiplies all gradients on the way (clipping), a number or a scalar tensor.
            only: update this parameter alone.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        generators: dict[torch.device, torch.Generator] = {}
        ordinal = 0 if only is None else self._ordinal(only)
        for group in self.param_groups:
            rule = RULES[group["rule"]]
            for pieces in self._pieces(group, rule, only):
                device = pieces[0].weight.device
                generator = generators.setdefault(device, torch.Generator(device))
                generator.manual_seed(_mixed_seed(self._seed, pieces[0].step, ordinal))
                _update(rule, group, pieces, gradient_factor, generator)
                ordinal += 1
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy saved states into the present ones, each dtype as it is.

        torch's own casts every state to its weight's dtype: fp32 moments of bf16 weights would be lost. What the run's
        config says (learning rate, decay, betas) is not loaded: the config is the law, also when it has changed.

        Raises:
            CheckpointError: if the states are of other parameters, rules or dtypes.
        """
        saved_groups, groups = state_dict["param_groups"], self.param_groups
        keys = [key for group in saved_groups for key in group["params"]]
        parameters = [parameter for group in groups for parameter in group["params"]]
        if len(keys) != len(parameters):
            raise CheckpointError(f"it holds optimizer states of {len(keys)} parameters, the run has {len(parameters)}")
        for key, parameter in zip(keys, parameters, strict=True):
            saved, present = state_dict["state"].get(key, {}), self.state[parameter]
            name = self._names[parameter]
            if saved.keys() != present.keys():
                raise CheckpointError(
                    f"optimizer states of {name} are {sorted(saved)} and the run needs {sorted(present)}",
                    remedy="resume with the optimizer that it was written by",
                )
            for state, value in present.items():
                other = saved[state]
                if not isinstance(value, Tensor):
                    present[state] = int(other)
                elif other.shape != value.shape or other.dtype != value.dtype:
                    raise CheckpointError(
                        f"{state} of {name} is {other.dtype} {list(other.shape)} and the run needs "
                        f"{value.dtype} {list(value.shape)}",
                        remedy="resume with the optimizer that it was written by",
                    )
                elif other is not value:
                    value.copy_(other)

    def _ordinal(self, parameter: Tensor) -> int:
        """A number far from those of other parameters, for the random bits of one that is updated alone."""
        if not self._ordinals:
            self._ordinals = {one: number << 32 for number, one in enumerate(self._names, 1)}
        return self._ordinals[parameter]

    def _pieces(self, group: dict[str, Any], rule: Rule, only: Tensor | None) -> Iterator[list[_Piece]]:
        """Lists of pieces that are updated together: one device, one dtype, at most a cacheful."""
        kinds: dict[tuple[Any, ...], list[_Piece]] = {}
        for parameter in group["params"]:
            if parameter.grad is None or (only is not None and parameter is not only):
                continue
            states = self.state[parameter]
            states["step"] += 1
            piece = _Piece(
                weight=_local(parameter.detach()),
                gradient=_local(parameter.grad),
                states={name: _local(value) for name, value in states.items() if name != "step"},
                step=states["step"],
            )
            moments = frozenset(value.dtype for value in piece.states.values())
            kinds.setdefault((piece.weight.device, piece.weight.dtype, moments), []).append(piece)
        for (device, *_), whole in kinds.items():
            if not rule.elementwise:
                yield from ([piece] for piece in whole)
                continue
            limit = _CPU_PIECE if device.type == "cpu" else _DEVICE_PIECE
            together: list[_Piece] = []
            count = 0
            for piece in whole:
                for part in _parts(piece, limit):
                    if count + part.weight.numel() > limit and together:
                        yield together
                        together, count = [], 0
                    together.append(part)
                    count += part.weight.numel()
            if together:
                yield together

    def _refuse_parts(self, parameter: Tensor, rule: Rule, name: str) -> None:
        placements = getattr(parameter, "placements", ())
        if not rule.elementwise and any(placement.is_shard() for placement in placements):
            raise refused(name, self._names[parameter])


def refused(rule: str, name: str) -> UserError:
    """What is said of a parameter that is sharded, where a rule takes whole ones."""
    return UserError(
        f"{rule} needs whole matrices, and {name} is sharded",
        where="optimizer.name",
        remedy="use adamw or stochastic_adamw",
    )


def _update(
    rule: Rule, group: dict[str, Any], pieces: list[_Piece], factor: float | Tensor, generator: torch.Generator
) -> None:
    """Widen, apply the rule, round back."""
    stored = [piece.weight for piece in pieces]
    narrow = stored[0].dtype == torch.bfloat16
    wide = torch.float32 if narrow else stored[0].dtype

    gradients = [piece.gradient for piece in pieces]
    if isinstance(factor, Tensor) or factor != 1.0 or any(gradient.dtype != wide for gradient in gradients):
        flat, gradients = _copied(gradients, wide)
        flat.mul_(factor)

    weights = stored
    if narrow:
        values, weights = _copied(stored, wide)
        if exact := group["rounding"] == "remainder":
            kept = [piece.states[_REMAINDER] for piece in pieces]
            remainders = _flat(kept)
            join(values, remainders)

    states: States = {}
    widened: list[tuple[list[Tensor], Tensor]] = []
    eight: list[tuple[str, list[Tensor]]] = []
    for name in pieces[0].states:
        if name == _REMAINDER or name.endswith(SCALE):
            continue
        states[name] = [piece.states[name] for piece in pieces]
        if states[name][0].dtype == torch.uint8:
            states[name] = [eight_bits.widened(p.states[name], p.states[name + SCALE], name) for p in pieces]
            eight.append((name, states[name]))
        elif states[name][0].dtype != wide:
            flat, wide_states = _copied(states[name], wide)
            widened.append((states[name], flat))
            states[name] = wide_states

    rule.update(weights, gradients, states, [piece.step for piece in pieces], group)

    # Moments in bf16 are rounded stochastically too: the second one moves by a thousandth a step, less than the half
    # of a bf16 digit, so rounding to nearest would freeze it.
    for narrow_states, flat in widened:
        _round(flat, narrow_states, generator)
    for name, moments in eight:
        for piece, moment in zip(pieces, moments, strict=True):
            eight_bits.narrowed(moment, piece.states[name], piece.states[name + SCALE], name)
    if narrow:
        if exact:
            high = _room(stored, torch.bfloat16)
            split(values, high, remainders)
            _put(high, stored)
            _put(remainders, kept)
        else:
            _round(values, stored, generator)


def _round(values: Tensor, tensors: list[Tensor], generator: torch.Generator) -> None:
    rounded = _room(tensors, torch.bfloat16)
    stochastic_round(values, rounded, generator)
    _put(rounded, tensors)


def _copied(tensors: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Copy tensors end to end into a flat one of another dtype; returns it and views of it with the tensors' shapes."""
    flat = torch.empty(sum(t.numel() for t in tensors), dtype=dtype, device=tensors[0].device)
    views = _views(flat, tensors)
    torch._foreach_copy_(views, tensors)
    return flat, views


def _flat(tensors: list[Tensor]) -> Tensor:
    """Tensors end to end; a single one is not copied."""
    return tensors[0].view(-1) if len(tensors) == 1 else torch.cat([t.view(-1) for t in tensors])


def _room(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Where values for `tensors` can be written before `_put`: a single one is written directly."""
    if len(tensors) == 1:
        return tensors[0].view(-1)
    return torch.empty(sum(t.numel() for t in tensors), dtype=dtype, device=tensors[0].device)


def _put(flat: Tensor, tensors: list[Tensor]) -> None:
    """Copy a flat tensor back into those that it stands for, unless it is itself the only one."""
    if len(tensors) > 1:
        torch._foreach_copy_(tensors, _views(flat, tensors))


def _views(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    return [part.view(t.shape) for part, t in zip(flat.split([t.numel() for t in like]), like, strict=True)]


def _parts(piece: _Piece, limit: int) -> Iterator[_Piece]:
    """Cut a piece of more than `limit` elements into flat ones."""
    count = piece.weight.numel()
    if count <= limit:
        yield piece
        return
    weight, gradient = piece.weight.view(-1), piece.gradient.reshape(-1)
    states = {name: value.view(-1) for name, value in piece.states.items()}
    for start in range(0, count, limit):
        size = min(limit, count - start)
        yield _Piece(
            weight.narrow(0, start, size),
            gradient.narrow(0, start, size),
            {name: _part(name, value, start, size) for name, value in states.items()},
            piece.step,
        )


def _part(name: str, state: Tensor, start: int, size: int) -> Tensor:
    """Of a flat state what belongs to some elements; of scales those of their blocks, which pieces never cut."""
    if name.endswith(SCALE):
        return state.narrow(0, start // BLOCK, -(-size // BLOCK))
    return state.narrow(0, start, size)


def _new_states(parameter: Tensor, rule: Rule, group: dict[str, Any], full_name: str) -> dict[str, Any]:
    narrow = parameter.dtype == torch.bfloat16
    dtype = parameter.dtype
    if narrow:
        dtype = torch.bfloat16 if group["state_dtype"] == "bf16" else torch.float32
    states: dict[str, Any] = {"step": 0}
    eight = has_eight_bits(parameter, group["state_dtype"])
    for name, shape in rule.states(parameter.shape, group).items():
        if eight:
            states |= eight_bit_states(parameter, full_name, name)
        else:
            states[name] = _zeros(parameter, shape, dtype)
    if narrow and group["rounding"] == "remainder":
        states[_REMAINDER] = _zeros(parameter, parameter.shape, torch.int16)
    return states


def _zeros(parameter: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    if shape == parameter.shape:
        # Like the parameter, so that the state of a sharded one is sharded alike.
        return torch.zeros_like(parameter, dtype=dtype, memory_format=torch.contiguous_format, requires_grad=False)
    return torch.zeros(shape, dtype=dtype, device=parameter.device)


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; a plain tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _mixed_seed(seed: int, step: int, ordinal: int) -> int:
    digest = hashlib.blake2b(f"{seed} {step} {ordinal}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
