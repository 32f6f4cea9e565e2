"""One model on trial: what plain Transformers makes of some documents, and what each layout makes of the same."""

from __future__ import annotations

import random
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from luthier.adapters.peft_experts import names_in_config
from luthier.adapters.targets import resolve_modules, resolve_targets
from luthier.config import LoraConfig
from luthier.errors import UserError
from luthier.hf.experts import find_experts
from luthier.hf.linear import linear_shape
from luthier.hf.load import build_on_meta, model_class
from luthier.hf.source import load_config, resolve
from luthier.verify.group import Failed, Group, Refused

LEARNING_RATE, MAX_GRADIENT_NORM = 0.1, 1.0
"""Plain gradient descent: Adam would blow up rounding errors where a gradient is zero in exact arithmetic."""

BOUND_OF_NARROW = 1e-6
"""What a gradient may be off in models that compute in fp32 inside, without more being asked."""
_NOISE_BOUND = 1e-4
"""What it may be off there if both sides agree once nothing is rounded to fp32; what is further off is wrong."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How far a layout may be from the reference.

    Attributes:
        gradient: per tensor, largest difference over largest entry; also of the norm.
        loss: relative.
        negligible: a tensor whose largest entry is below this share of the largest of all counts as zero.
    """

    gradient: float
    loss: float
    negligible: float

    @staticmethod
    def of(precision: str, narrow: bool) -> Bounds:
        """The bounds of a precision.

        Args:
            precision: dtype of the run.
            narrow: the model itself computes in fp32 inside, whatever it is told.
        """
        if precision == "float64":
            return Bounds(BOUND_OF_NARROW, 1e-6, 1e-7) if narrow else Bounds(1e-10, 1e-9, 1e-13)
        return Bounds(2e-6, 1e-5, 1e-6)


Status = Literal["right", "refused", "wrong", "failed"]


@dataclass(frozen=True, slots=True)
class Cell:
    """One model on one layout.

    Attributes:
        layout: its name, " with LoRA" where adapters were trained.
        status: right; refused, with the reason; wrong numbers; or failed, which is also wrong.
        reason: why it was refused, or what is wrong.
        trace: of an exception.
        measured: a `Measured` as plain data, None where there is none.
        export: the difference of the export read back, as a `Difference`.
        bounds: what it was held to.
        widened: a `Measured` of both sides with float64 in the place of the model's fp32, held to the bounds of
            float64, where the model was further off than fp32 inside is allowed without; None elsewhere.
    """

    layout: str
    status: Status
    reason: str = ""
    trace: str = ""
    measured: Mapping[str, Any] | None = None
    export: Mapping[str, Any] | None = None
    bounds: Bounds | None = None
    widened: Mapping[str, Any] | None = None

    @property
    def error(self) -> float:
        """The worst difference of a gradient."""
        return float(self.measured["gradients"]["worst"]) if self.measured is not None else float("nan")


def documents(
    vocabulary: int, lengths: Sequence[int], steps: int, seed: int = 0
) -> list[list[dict[str, list[int] | list[float]]]]:
    """Random documents for some steps; about a third of the positions is not trained on, a third counts half.

    Args:
        vocabulary: ids are below this.
        lengths: of the documents of every step.
        steps: how many.
        seed: of the tokens.
    """
    generator = random.Random(seed)

    def one(length: int) -> dict[str, list[int] | list[float]]:
        ids = [generator.randrange(4, min(vocabulary, 1000)) for _ in range(length + 1)]
        weights = [generator.choice([0.0, 0.5, 1.0]) for _ in range(length)]
        return {"tokens": ids[:-1], "targets": ids[1:], "weights": [*weights[:-1], 1.0]}

    return [[one(length) for length in lengths] for _ in range(steps)]


class Trial:
    """A model and its documents.

    Args:
        model: "path", and "gguf_file" or "revision".
        steps: the documents of each step.
        scratch: a directory for what the two sides leave for one another; emptied.
        reference: the process of plain Transformers.
        adapter: what LoRA is, fields of the config's section; by default small adapters on every linear layer.
        options: other arguments of `build_state`.
        device: where both sides compute.
        large: a real model, in which so many numbers are rounded to fp32 in norms that some fall to the other side.
    """

    def __init__(
        self,
        model: Mapping[str, Any],
        steps: Sequence[Sequence[Mapping[str, Any]]],
        scratch: Path,
        reference: Group,
        *,
        adapter: LoraConfig | None = None,
        options: Mapping[str, Any] | None = None,
        device: str = "cpu",
        large: bool = False,
    ) -> None:
        self._large = large
        self._model, self._steps, self._scratch, self._reference = dict(model), steps, scratch, reference
        self._lora = adapter or LoraConfig(rank=4, alpha=8.0, target=["all-linear"])
        self._options, self._device = dict(options or {}), device
        self._known: dict[bool, dict[str, Any]] = {}
        self._failures: dict[bool, Failed] = {}
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)

    def expected(self, lora: bool) -> dict[str, Any]:
        """What the reference says; asked once.

        Raises:
            Failed: plain Transformers (or PEFT) cannot do it either.
        """
        if (failure := self._failures.get(lora)) is not None:
            raise failure
        if lora not in self._known:
            try:
                self._known[lora] = self._ask(lora)
            except Failed as error:
                self._failures[lora] = error
                raise
        return self._known[lora]

    def _ask(self, lora: bool) -> dict[str, Any]:
        """Ask in float64, and in fp32 where the model refuses float64. PEFT adapts most layers that compute in a way of
        their own, but not all: then without those."""
        failure: Failed | None = None
        for plain in (False, True) if lora else (False,):
            for precision in ("float64", "float32"):
                output = self._scratch / ("lora" if lora else "full")
                shutil.rmtree(output, ignore_errors=True)
                output.mkdir()
                adapter = self._adapted(output, plain) if lora else None
                try:
                    told = self._run(precision, output, adapter)
                except Failed as error:
                    failure = failure or error
                    continue
                place = adapter["directory"] if adapter is not None else None
                told["narrow"] = told["narrow"] or (self._large and told["rounding"])
                return {**told, "precision": precision, "output": str(output), "adapter": place}
        assert failure is not None
        raise failure

    def cell(self, group: Group, parallel: Mapping[str, Any], *, lora: bool = False, name: str = "") -> Cell:
        """Measure a layout.

        Args:
            group: as many ranks as it takes.
            parallel: fields of the config's section.
            lora: adapters beside frozen weights instead of full fine-tuning.
            name: of the layout.
        """
        try:
            expected = self.expected(lora)
        except Failed as error:
            return Cell(name, "refused", f"plain {'PEFT' if lora else 'Transformers'} cannot train it: {error}")
        except UserError as error:
            return Cell(name, "refused", error.what)
        bounds = Bounds.of(expected["precision"], expected["narrow"])
        subject = {
            "model": self._model,
            "precision": expected["precision"],
            "learning_rate": LEARNING_RATE,
            "adapter": expected["adapter"],
            "parallel": dict(parallel),
            "options": self._options,
        }

        def measure(reference: Mapping[str, Any], negligible: float, *, widened: bool) -> dict[str, Any]:
            return group.call(
                "measure",
                subject={**subject, "widened": True, "precision": "float64"} if widened else subject,
                steps=self._steps,
                reference={key: reference[key] for key in ("losses", "norms")},
                gradients=reference["output"],
                max_gradient_norm=MAX_GRADIENT_NORM,
                negligible=negligible,
                export=None if widened else str(self._scratch / "export"),
            )

        try:
            measured = measure(expected, bounds.negligible, widened=False)
            export = self._round_trip(group, expected["precision"], lora)
            found = fault(measured, export, bounds)
            wide = None
            loose = replace(bounds, gradient=_NOISE_BOUND)
            narrow = expected["narrow"] or expected["precision"] != "float64"
            if found and narrow and not fault(measured, export, loose):
                bounds, exact = loose, Bounds.of("float64", narrow=False)
                wide = measure(self._widened(lora), exact.negligible, widened=True)
                found = fault(wide, export, exact)
                found = found and f"with float64 in the place of fp32: {found}"
            return Cell(name, "wrong" if found else "right", found, "", measured, export, bounds, wide)
        except Refused as error:
            return Cell(name, "refused", str(error), bounds=bounds)
        except Failed as error:
            return Cell(name, "failed", str(error), error.trace, bounds=bounds)

    def _widened(self, lora: bool) -> dict[str, Any]:
        """What the reference says if nothing in it is fp32; asked once.

        Sums in fp32 that are added in another order are off by a share of what is added, not of what is left, and
        where large numbers cancel little is left. No bound on that difference tells rounding from a fault. If nothing
        is rounded to fp32 on either side, only a fault is left."""
        expected = self.expected(lora)
        if "widened" not in expected:
            output = self._scratch / ("widened-lora" if lora else "widened")
            shutil.rmtree(output, ignore_errors=True)
            output.mkdir()
            adapter = {"directory": expected["adapter"]} if lora else None
            told = self._run("float64", output, adapter, widened=True)
            expected["widened"] = {**told, "output": str(output)}
        told = expected["widened"]
        return told

    def _run(
        self, precision: str, output: Path, adapter: Mapping[str, Any] | None, *, widened: bool = False
    ) -> dict[str, Any]:
        told: dict[str, Any] = self._reference.call(
            "run",
            model=self._model,
            steps=self._steps,
            precision=precision,
            learning_rate=LEARNING_RATE,
            max_gradient_norm=MAX_GRADIENT_NORM,
            output=str(output),
            adapter=adapter,
            device=self._device,
            widened=widened,
        )
        return told

    def _round_trip(self, group: Group, precision: str, lora: bool) -> dict[str, Any]:
        file = str(self._scratch / "reloaded.safetensors")
        told = self._reference.call(
            "reload",
            export=str(self._scratch / "export"),
            precision=precision,
            output=file,
            adapter_of=self._model if lora else None,
        )
        return group.call("compare", reloaded=file, names=told["names"])

    def _adapted(self, output: Path, plain: bool = False) -> dict[str, Any]:
        """The adapter that PEFT is to make, or to read; what it adapts by full names: linear modules (only those that
        compute as `nn.Linear` does, if they are to be plain), and weights: of fused experts, and of layers that PEFT
        would take for experts, of models whose experts no adapter is for."""
        lora = self._lora
        if lora.start_from is not None:
            return {"directory": lora.start_from}
        path, gguf = str(self._model["path"]), self._model.get("gguf_file")
        source = resolve(f"{path}/{gguf}" if gguf else path, revision=self._model.get("revision"))
        config = load_config(source)
        model = build_on_meta(model_class(source, config), config)
        modules = dict(model.named_modules())
        trained = resolve_modules(model, lora.train_modules)
        names = resolve_targets(model, lora.target, without=trained)
        shapes = {name: linear_shape(modules[name]) for name in names if name in modules}
        names = [name for name in names if not plain or (shape := shapes.get(name)) is None or shape.plain]
        # Mamba reads the weight of this one without calling it
        names = [name for name in names if not name.endswith(".dt_proj")]
        if not any(group.matrices for group in find_experts(model)):
            names = list(names_in_config(model, names).values())
        return {
            "directory": str(output / "adapter"),
            "rank": lora.rank,
            "alpha": lora.alpha or 2 * lora.rank,
            "rslora": lora.rslora,
            "modules": [name for name in names if name in modules],
            "parameters": [name for name in names if name not in modules],
            "trained": trained,
        }


def fault(measured: Mapping[str, Any], export: Mapping[str, Any], bounds: Bounds) -> str:
    """What is beyond its bound, or ""."""
    gradients = measured["gradients"]
    for what, names in (
        ("no rank has a gradient of", gradients["missing"]),
        ("a gradient too many:", gradients["extra"]),
    ):
        if names:
            return f"{what} {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"
    for what, error, bound in (
        ("loss", measured["loss_error"], bounds.loss),
        (f"gradient of {gradients['tensor']}", gradients["worst"], bounds.gradient),
        ("gradient norm", measured["norm_error"], bounds.gradient),
    ):
        if not error <= bound:
            return f"{what} off by {error:.1e}, allowed {bound:.0e}"
    if measured["copies"]:
        return f"ranks hold different copies of {', '.join(measured['copies'][:3])}"
    if export["missing"] or export["extra"]:
        return f"export: {', '.join([*export['missing'], *export['extra']][:3])} on one side only"
    if export["equal"] < export["tensors"]:
        changed = export["tensors"] - export["equal"]
        return f"export: {changed} of {export['tensors']} weights differ, {export['tensor']} most"
    return ""
