"""The side that is to be proved: the engine on a layout, a few steps, held against the files of the reference."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open

from luthier.adapters import save_peft
from luthier.batch import Batch, Sample
from luthier.config import LoraConfig, ParallelConfig
from luthier.config.sections import SGDConfig
from luthier.engine.build import build_state
from luthier.engine.step import forward_backward_all, optim_step
from luthier.hf.gather import local_part
from luthier.hf.save import save_model
from luthier.hf.source import ModelSource, resolve
from luthier.parallel.layout import Layout
from luthier.parallel.mesh import Mesh
from luthier.parallel.norm import settle
from luthier.verify.compare import Difference, compare, copies_agree
from luthier.verify.reference import widening

PRECISIONS = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16"}

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True, slots=True)
class Measured:
    """What a layout computed beside the reference, the same on every rank.

    Attributes:
        layout: its name.
        losses: of each step.
        norms: gradient norm of each step.
        loss_error: largest relative difference of a loss.
        norm_error: of a norm.
        gradients: the worst difference of a gradient over all steps, the worst tensor first.
        copies: names of weights of which two ranks hold different copies after the steps.
        packed: several documents lay in one microbatch.
        adapters: what was adapted, in words; "" in full fine-tuning.
    """

    layout: str
    losses: list[float]
    norms: list[float]
    loss_error: float
    norm_error: float
    gradients: Difference
    copies: tuple[str, ...]
    packed: bool
    adapters: str


@functools.cache
def _mesh(layout: Layout, device: torch.device) -> Mesh:
    """One mesh for all models of a layout: every group of it holds threads, which a machine soon has too many of."""
    return Mesh(layout, device)


class Subject:
    """A model made ready on this rank for as many steps as the reference took; all ranks do the same.

    Args:
        model: what the reference got: "path", and "gguf_file" or "revision".
        precision: dtype of weights and arithmetic ("float64").
        learning_rate: of plain gradient descent.
        adapter: a directory of PEFT's files to train; None trains everything.
        parallel: fields of the config's section; its degrees make the number of ranks there are.
        device: of this rank.
        options: other arguments of `build_state`.
        widened: read and compute in float64 also what the model has in fp32 whatever it is told.
    """

    def __init__(
        self,
        model: Mapping[str, Any],
        *,
        precision: str,
        learning_rate: float,
        adapter: str | None = None,
        parallel: Mapping[str, Any] | None = None,
        device: str = "cpu",
        options: Mapping[str, Any] | None = None,
        widened: bool = False,
    ) -> None:
        config = ParallelConfig(**(parallel or {}))
        layout = Layout.resolve(config, dist.get_world_size() if dist.is_initialized() else 1)
        where = torch.device(device)
        self.mesh = _mesh(layout, where) if layout.ranks > 1 else None
        self.layout = layout
        self._wide = widening if widened else nullcontext
        with self._wide():
            self.state = build_state(
                _source(model),
                adapter=LoraConfig(start_from=adapter) if adapter is not None else None,
                optimizer=SGDConfig(name="sgd", learning_rate=learning_rate),
                precision=PRECISIONS[precision],  # type: ignore[arg-type]
                device=where,
                mesh=self.mesh,
                parallel=config,
                **(options or {}),
            )

    def train(
        self,
        steps: Sequence[Sequence[Mapping[str, Any]]],
        reference: Mapping[str, Any],
        gradients: Path,
        *,
        max_gradient_norm: float,
        negligible: float,
    ) -> Measured:
        """Take the steps that the reference took and compare every one with it.

        Args:
            steps: the documents of each, as of `reference.run`.
            reference: what that returned.
            gradients: its output directory.
            max_gradient_norm: as there.
            negligible: as of `compare`.
        """
        state, mesh = self.state, self.mesh
        state.model.eval()  # as the reference: dropout and noise in routers cannot be compared
        losses, norms, worst = [], [], None
        for number, documents in enumerate(steps, 1):
            batches = self._own(documents)
            with self._wide():
                found = forward_backward_all(state, batches)
            loss = sum((one.loss.double() for one in found), torch.zeros((), dtype=torch.float64, device=state.device))
            loss = mesh.sum(loss) if mesh is not None else loss
            if mesh is not None:
                settle(state.trainable.values())
            if state.pipeline is not None:
                state.pipeline.settle()
            difference = self._gradients(gradients / f"gradients-{number}.safetensors", negligible)
            worst = difference if worst is None or difference.worst > worst.worst else worst
            stepped = optim_step(state, loss=float(loss), max_gradient_norm=max_gradient_norm)
            losses.append(float(loss))
            norms.append(stepped.gradient_norm)
        assert worst is not None
        return Measured(
            layout=str(self.layout),
            losses=losses,
            norms=norms,
            loss_error=_relative(losses, reference["losses"]),
            norm_error=_relative(norms, reference["norms"]),
            gradients=worst,
            copies=copies_agree(state.trainable) if mesh is not None else (),
            packed=not state.packing_fault,
            adapters=str(state.lora) if state.lora is not None else "",
        )

    def export(self, directory: Path) -> None:
        """Write what was trained as Hub files, or as PEFT's where adapters were."""
        group = dist.group.WORLD if self.mesh is not None else None
        if self.state.is_main:
            shutil.rmtree(directory, ignore_errors=True)
        if self.mesh is not None:
            dist.barrier()
        if self.state.lora is not None:
            save_peft(self.state.model, directory, group=group)
        else:
            save_model(self.state.model, directory, tokenizer=None, group=group)

    def equals(self, reloaded: Path, names: Sequence[str]) -> Difference:
        """Compare what is in memory with what plain Transformers read from the export, bit for bit.

        Args:
            reloaded: the file that `reference.reload` wrote.
            names: of the parameters in it, tied ones once.
        """
        held = {
            name: (parameter, parameter.detach())
            for name, parameter in self._named()
            if self.state.lora is None or parameter.requires_grad
        }
        return compare(held, TensorFile(reloaded, names), negligible=0.0, everywhere=self.mesh is not None)

    def _own(self, documents: Sequence[Mapping[str, Any]]) -> list[Batch]:
        """The microbatches of this rank: two documents each where they may lie together, all scaled to the step."""
        samples = [
            Sample(np.array(d["tokens"]), np.array(d["targets"]), np.array(d["weights"], dtype=np.float32))
            for d in documents
        ]
        size = 1 if self.state.packing_fault else 2
        batches = [Batch.pack(samples[start : start + size]) for start in range(0, len(samples), size)]
        total = sum(batch.total_weight for batch in batches)
        rank, ranks = (self.mesh.data_rank, self.mesh.data_ranks) if self.mesh is not None else (0, 1)
        assert len(batches) % ranks == 0, f"{len(batches)} microbatches for {ranks} ranks"
        return [batch.scaled(1 / total) for batch in batches[rank::ranks]]

    def _gradients(self, file: Path, negligible: float) -> Difference:
        reference = TensorFile(file)
        held = {}
        for name, parameter in self._named():
            if not parameter.requires_grad:
                continue
            gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            # a weight that takes no part has no gradient there, and none or zeros here
            if name in reference or bool(local_part(gradient).any()):
                held[name] = (parameter, gradient)
        return compare(held, reference, negligible=negligible, everywhere=self.mesh is not None)

    def _named(self) -> list[tuple[str, torch.nn.Parameter]]:
        """This rank's parameters by the names that the reference has for them, tied ones once."""
        named = []
        for name, parameter in self.state.model.named_parameters():
            for wrapper in _WRAPPERS:
                name = name.replace(wrapper, "")
            named.append((name, parameter))
        return named


class TensorFile(Mapping[str, torch.Tensor]):
    """Tensors of a safetensors file, each read when it is asked for.

    Args:
        file: where they are.
        names: those that count; all of them when left out.
    """

    def __init__(self, file: Path, names: Sequence[str] | None = None) -> None:
        with safe_open(file, "pt") as opened:
            self._names = sorted(opened.keys() if names is None else names)
        self._file = file

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        with safe_open(self._file, "pt") as opened:
            return opened.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _source(model: Mapping[str, Any]) -> ModelSource:
    path = str(model["path"])
    text = f"{path}/{model['gguf_file']}" if model.get("gguf_file") else path
    return resolve(text, revision=model.get("revision"))


def _relative(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return max(abs(a - b) / max(abs(b), 1e-300) for a, b in zip(ours, theirs, strict=True))
