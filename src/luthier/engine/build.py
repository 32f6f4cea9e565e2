"""THE one order in which a model is made ready to train.

On meta: adapters in place -> the whole model described -> on a layout: cut into stages, tensors, experts and rows,
recomputation, compilation, FSDP. Then the weights are streamed in, each rank reading its part; ties settled, adapters
initialised, the rest frozen; in one process: fast modules, each checked against its own forward, and packing proved on
the model itself. Last the optimizer.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Required, TypedDict, Unpack

import torch

from luthier.adapters import (
    AdapterReport,
    LoftQ,
    LoraReport,
    apply_adapter,
    finish_adapter,
    is_adapter_weight,
    learning_rates,
    other_base,
    packing_of,
    part_on_meta,
    quantizable,
    quantized_report,
    require_whole_blocks,
)
from luthier.adapters.rows import NewTokens
from luthier.config import AdapterConfig, LoraConfig, MoeConfig, OptimizerConfig, ParallelConfig
from luthier.engine.balance import Balance
from luthier.engine.logprobs import Head
from luthier.engine.network import Network
from luthier.engine.state import TrainState
from luthier.errors import ConfigError, ModelError
from luthier.hf.allocator import bound_kernel_cache, tune_allocator
from luthier.hf.anatomy import Anatomy, describe
from luthier.hf.classifier import attach_score
from luthier.hf.debug.small import kind_of, make_small
from luthier.hf.fast_cpu import accelerate_model
from luthier.hf.forward import let_mask_itself, masks_itself, packing_is_exact
from luthier.hf.head import HeadInfo, linear_head
from luthier.hf.initialise import row_reset_on_reading
from luthier.hf.joined import joined_dims, stacked_dims
from luthier.hf.limits import Limits, limits_of
from luthier.hf.load import DTYPES, load_model, tie_on_meta
from luthier.hf.source import ModelSource
from luthier.optim.build import build_optimizer
from luthier.optim.in_backward import InBackward
from luthier.parallel import context, expert, rules, tensor
from luthier.parallel.checkpointing import Policy, checkpoint_activations
from luthier.parallel.fsdp import shard, sum_what_is_whole
from luthier.parallel.mesh import Mesh
from luthier.parallel.norm import square
from luthier.parallel.pipeline import Cut, Pipeline, cut
from luthier.parallel.programs import stages_of

logger = logging.getLogger(__name__)

CPU_ROWS = 64
"""Packed rows have another length in every step. On the CPU each new length costs compilations in oneDNN, and blocks of
memory of yet another size; a few positions of padding cost less."""
Precision = Literal["fp32", "bf16", "fp64"]


def choose_device(name: str | None) -> torch.device:
    """The device asked for, else CUDA where there is one, else the CPU.

    Raises:
        ConfigError: there is no such device here.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.split(":")[0] == "mps":
        what = "mps has no float64, in which weights of the loss and norms are summed"
        raise ConfigError(what, where="train.device", remedy="leave it out for the CPU")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"{name} cannot be used here ({str(error).splitlines()[0]})", where="train.device", remedy="leave it out"
        ) from None
    return device


def choose_precision(asked: Precision | None, device: torch.device) -> Precision:
    """The precision asked for, else bf16 where the device multiplies bf16 matrices in hardware, else fp32.

    Raises:
        ConfigError: there is no such precision.
    """
    if asked is not None:
        if asked not in DTYPES:
            raise ConfigError(f"{asked} is not offered", where="precision", remedy=f"use {' or '.join(DTYPES)}")
        return asked
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    if device.type == "cpu":
        fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return "bf16" if fast else "fp32"
    return "fp32"


class How(TypedDict, total=False):
    """How a model is made ready: keywords of `build_network` and `build_state`. All but `adapter` may be left out."""

    adapter: Required[AdapterConfig | None]
    """LoRA, or another kind, beside frozen weights; None trains everything."""
    precision: Precision | None
    """Dtype of weights and arithmetic; what the device is fast at when left out."""
    device: torch.device | None
    """Where the model goes; the fastest there is when left out."""
    attention: str | None
    """Attention implementation; chosen for the architecture when left out."""
    from_scratch: bool
    """The model's own random initialisation instead of the weights."""
    trust_remote_code: bool
    """Run code that the model's repository brings."""
    tokens: NewTokens | None
    """Whose rows of embedding and head train beside LoRA; none when left out."""
    seed: int
    """Of the random initialisation and of the adapters; 0 when left out."""
    score: bool
    """A score beside the head, which trains in its place."""
    activation_checkpointing: Policy
    """What the backward pass computes again; nothing when left out."""
    compile_layers: bool
    """torch.compile, layer by layer."""
    mesh: Mesh | None
    """Of a run on several ranks, all of which make the call; one process when left out."""
    parallel: ParallelConfig
    """How the mesh is used; its degrees are the mesh's."""


def build_network(
    source: ModelSource,
    *,
    moe: MoeConfig | None = None,
    optimizer: OptimizerConfig | None = None,
    **how: Unpack[How],
) -> Network:
    """A model with its weights and, where asked for, adapters in place; only what trains requires gradients.

    Args:
        source: where the weights are.
        moe: how experts are kept busy while the model trains; None where it does not train.
        optimizer: that will train it, and may refuse the layout; None where it does not train.
        how: see `How`.

    Raises:
        ConfigError: the model cannot be laid out so.
        ModelError: the model, or an adapter's files, cannot be read or used.
    """
    bound_kernel_cache()
    plan = _Plan(how, moe, optimizer)
    adapter, device, mesh, seed = how["adapter"], plan.device, plan.mesh, plan.seed
    if plan.packing is not None and device.type == "cpu":
        tune_allocator(keep=False)  # plain weights come and go, one at a time
    model = load_model(
        source,
        dtype=DTYPES[choose_precision(how.get("precision"), device)],
        device=device,
        attention=how.get("attention"),
        prepare=plan.lay_out,
        from_scratch=how.get("from_scratch", False),
        seed=seed,
        trust_remote_code=how.get("trust_remote_code", False),
        packing=plan.packing,
    )
    pipeline = None
    if plan.stages is not None and mesh is not None and mesh.pp is not None:
        width = model.config.get_text_config().hidden_size
        pipeline = Pipeline(model, plan.stages, mesh.pp, device=device, dtype=plan.dtype, width=width)
    lora = plan.lora
    if adapter is not None:
        alone = pipeline.run_alone if pipeline is not None else None
        found = finish_adapter(model, adapter, seed, run=alone, part=mesh is not None)
        lora = found if mesh is None else lora or found  # a rank sees its part alone
        if isinstance(lora, LoraReport):
            lora = replace(lora, quantized=plan.quantized)
        start = adapter.start_from
        other = other_base(Path(start), source.name, source.text) if start is not None else None
        if other is not None and (mesh is None or mesh.rank == 0):
            logger.warning("the adapter in %s was made for %s, and is put on %s", start, other, source.text)
    if how.get("score", False):
        attach_score(model, seed)
    if mesh is not None and mesh.fsdp is not None:
        sum_what_is_whole(model, mesh.fsdp)
    if mesh is None:
        if device.type == "cpu":
            for line in accelerate_model(model):
                logger.debug("%s", line)
        _, packing_fault = packing_is_exact(model)
        plan.recompute_and_compile(model, plan.anatomy.layers)
    else:
        packing_fault = _packing_fault(model, plan.outline)
    rate = moe.bias_update_rate if moe is not None else None
    padded = device.type == "cpu" and plan.dtype != torch.float64 and not packing_fault
    return Network(
        model=model,
        head=Head(model, linear=plan.head, dtype=plan.dtype),
        device=device,
        source=source,
        outline=plan.outline,
        mesh=mesh,
        pipeline=pipeline,
        lora=lora,
        row_multiple=CPU_ROWS if padded else 1,
        packing_fault=packing_fault,
        limits=plan.limits,
        balance=Balance(model, plan.auxiliary, rate, mesh) if plan.auxiliary or rate else None,
        parameters=plan.parameters,
    )


def _packing_fault(model: Any, outline: Any) -> str:
    """Why packing is not exact in this architecture, tried on a small model of its kind: of the model itself each rank
    has a part alone."""
    try:
        small = make_small(kind_of(outline))
    except ModelError as error:
        return error.what
    _, fault = packing_is_exact(small)
    if masks_itself(small):
        let_mask_itself(model)
    return fault


def _refuse_what_reading_resets(model: Any) -> None:
    row = row_reset_on_reading(model)
    if row is not None and model.get_input_embeddings().weight.requires_grad:
        what = (
            f"Transformers sets the embedding of the padding token {row} to 0 whenever it reads {type(model).__name__}"
        )
        raise ConfigError(
            f"{what}, and what training makes of it would be lost",
            where="model",
            remedy="train adapters, or set pad_token_id to null in its config.json",
        )


class _Plan:
    """What happens to a model on meta, before its weights are read; `lay_out` is the order.

    What is asked about the whole model is asked before it is cut: afterwards a rank sees its own part alone.
    """

    anatomy: Anatomy
    dtype: torch.dtype
    limits: Limits
    head: HeadInfo | None
    lora: AdapterReport | None = None
    outline: Any = None
    parameters: int
    stages: Cut | None = None
    auxiliary: float = 0.0
    quantized: str = ""

    def __init__(self, how: How, moe: MoeConfig | None, optimizer: OptimizerConfig | None) -> None:
        self._how, self._moe, self._optimizer = how, moe, optimizer
        self.device = how.get("device") or choose_device(None)
        self.mesh, self.seed = how.get("mesh"), how.get("seed", 0)
        self.packing = packing_of(lora if isinstance(lora := how["adapter"], LoraConfig) else None)

    def lay_out(self, model: Any) -> None:
        adapter = self._how["adapter"]
        if adapter is not None:
            self.lora = apply_adapter(model, adapter, self.seed, self._how.get("tokens"))
        self.dtype = model.dtype  # of its first weight, which on another stage may be one that is kept in fp32
        self.anatomy, self.limits, self.head = describe(model), limits_of(model), linear_head(model)
        tied = set(model.all_tied_weights_keys)
        self.parameters = sum(p.numel() for name, p in model.named_parameters() if name not in tied)
        if self.packing is not None:
            self.packing.names = quantizable(model)
            if isinstance(self.packing, LoftQ):
                self.packing.model = model
            self.quantized = str(quantized_report(model, self.packing.names, self.packing.double))
        if self._moe is not None:
            _refuse_what_reading_resets(model)
            self.auxiliary = Balance.coefficient_of(model, self._moe, adapted=adapter is not None)
        if self.mesh is not None:
            self.outline = copy.deepcopy(model)
            if self.device.type == "cpu":
                accelerate_model(model)
            self._cut(model, self.mesh)
            if self.packing is not None:
                self.packing.names = self._packed_here(model)
                require_whole_blocks(model, self.packing)

    def _packed_here(self, model: Any) -> list[str]:
        here = model.state_dict().keys()
        return [name for name in self.packing.names if name in here] if self.packing is not None else []

    def recompute_and_compile(self, model: Any, layers: Iterable[str]) -> None:
        checkpoint_activations(model, self._how.get("activation_checkpointing", "off"))
        if self._how.get("compile_layers", False):
            for name in layers:
                model.get_submodule(name).compile()

    def _cut(self, model: Any, mesh: Mesh) -> None:
        parallel = self._how.get("parallel") or ParallelConfig()
        schedule, compiled = parallel.pipeline_schedule, self._how.get("compile_layers", False)
        each = stages_of(schedule, parallel.stages_per_rank)
        rules.check(model, mesh.layout, each, self._optimizer)
        layers = self.anatomy.layers
        roots: list[tuple[Any, Sequence[Any]]] = [(model, [model.get_submodule(name) for name in layers])]
        if mesh.pp is not None:
            self.stages = cut(model, mesh.pp, schedule=schedule, stages_per_rank=each, compiled=compiled)
            layers = self.stages.layers
            roots = [(stage, stage.layers) for stage in self.stages.stages]
        if mesh.tp is not None:
            tensor.shard(
                model,
                mesh.tp,
                leave_alone=[group.name for group in expert.dealt_whole(model, mesh)],
                sequence_parallel=parallel.sequence_parallel,
                runs=None
                if self.stages is None
                else [s.roles.layers[s.part.start : s.part.stop] for s in self.stages.stages],
            )
        dealt = set(expert.shard(model, mesh))
        if mesh.cp is not None:
            context.prepare(model, mesh.cp)
        self.recompute_and_compile(model, layers)
        part_on_meta(model, self.anatomy)
        tie_on_meta(model)
        if mesh.fsdp is None:
            return
        for root, own in roots:
            shard(
                root,
                own,
                mesh.fsdp,
                reshard=parallel.reshards(mesh.stages),
                cpu_offload=parallel.cpu_offload,
                experts=[module for module in root.modules() if module in dealt],
                expert_mesh=mesh.efsdp,
                joined=joined_dims(model),
                stacked=stacked_dims(model),
                packed=[model.get_parameter(name) for name in self._packed_here(model)],
            )


def build_state(
    source: ModelSource, *, optimizer: OptimizerConfig, moe: MoeConfig | None = None, **how: Unpack[How]
) -> TrainState:
    """A model and its optimizer, ready for the first step.

    Args:
        source: where the weights are.
        optimizer: as of the YAML.
        moe: how experts are kept busy; as the model's config says when left out.
        how: see `How`.

    Raises:
        as `build_network`.
    """
    network = build_network(source, moe=moe or MoeConfig(), optimizer=optimizer, **how)
    model = network.model
    model.train()
    if network.device.type == "cpu":
        # after loading, so that what loading freed has gone back to the system
        tune_allocator(keep=network.mesh is None or network.mesh.layout.fsdp * network.mesh.layout.efsdp == 1)
    inside = tuple(f"{layer}." for layer in describe(model).layers)
    made = build_optimizer(
        model.named_parameters(),
        optimizer,
        adapters=is_adapter_weight,
        hidden_matrices=lambda name: name.startswith(inside),
        rates=learning_rates(model, how["adapter"]),
        seed=how.get("seed", 0),
        part=network.pipeline is not None,
    )
    known = {field.name: getattr(network, field.name) for field in fields(network)}
    state = TrainState(optimizer=made, **known)
    if optimizer.in_backward:
        state.in_backward = InBackward(made, state.trainable, partial(square, mesh=network.mesh))
    return state
