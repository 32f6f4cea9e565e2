"""The reference: unmodified Transformers (and PEFT) in one process of its own, each document alone.

This file imports nothing of Luthier, so that the two sides of the proof share no code: it reads a directory as any
user of Transformers would, and leaves losses, gradients and weights in files for the other side to look at. What the
other side takes from here is `widening` alone, which says float64 to both of them.
"""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM

_MAMBAS = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
"""Where PEFT adapts no `out_proj`, since fused kernels pass it by."""
_NORM = re.compile("norm", re.IGNORECASE)


def make(directory: str, seed: int = 0) -> dict[str, Any]:
    """Give the config in a directory weights, so large that faults of masks, caps and positions show in the numbers.

    Args:
        directory: holds `config.json`; the weights are written beside it, in float64.
        seed: of the weights.

    Returns:
        the model's class and its number of parameters.
    """
    config = AutoConfig.from_pretrained(directory)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.ndim >= 2:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
            else:
                parameter.add_(0.1 * noise)
    model.save_pretrained(directory)
    return {"class": type(model).__name__, "parameters": sum(p.numel() for p in model.parameters())}


def run(
    model: Mapping[str, Any],
    steps: Sequence[Sequence[Mapping[str, Any]]],
    *,
    precision: str,
    learning_rate: float,
    max_gradient_norm: float,
    output: str,
    adapter: Mapping[str, Any] | None = None,
    device: str = "cpu",
    widened: bool = False,
) -> dict[str, Any]:
    """Train a few steps of plain gradient descent.

    Args:
        model: "path", and "gguf_file" or "revision" where there are any.
        steps: of each step the documents, {"tokens", "targets", "weights"}; the loss is the sum of weight x
            cross-entropy over the sum of weights.
        precision: dtype of weights and arithmetic ("float64").
        learning_rate: of every parameter.
        max_gradient_norm: gradients are scaled down to this norm.
        output: a directory for the gradients, `gradients-1.safetensors` of the first step and so on.
        adapter: LoRA beside frozen weights: "directory", where PEFT's files are written (or read, if they are there),
            and of new ones "rank", "alpha", "rslora", "modules" and "parameters" to adapt (full names of linear
            modules, and of weights of fused experts), "trained" modules to train whole; both matrices are random.
        device: where to compute.
        widened: read and compute in float64 also what the model has in fp32 whatever it is told.

    Returns:
        "losses" and "norms" of the steps; "narrow": whether the model computes in fp32 inside, whatever it is told;
        "rounding": whether anything at all is rounded to fp32, activations in norms included; "class" of the model;
        "trained" and "total" parameters.
    """
    wide = widening if widened else nullcontext
    with wide():
        plain = _load(model, precision, device)
        trained = plain if adapter is None else _adapted(plain, adapter)
    losses, norms, narrow, rounding = [], [], False, False
    for number, documents in enumerate(steps, 1):
        trained.zero_grad(set_to_none=True)
        total = sum(sum(document["weights"]) for document in documents)
        loss = 0.0
        for document in documents:
            with _watching(trained) as seen, wide():
                loss += _backward(trained, document, total)
            narrow, rounding = narrow or seen.narrow, rounding or seen.rounding
        gradients = {n: p.grad for n, p in trained.named_parameters() if p.grad is not None}
        norm = torch.nn.utils.get_total_norm(gradients.values())
        _write(trained, gradients, Path(output) / f"gradients-{number}.safetensors")
        losses.append(loss)
        norms.append(float(norm))
        factor = min(1.0, max_gradient_norm / float(norm)) if norm > 0 else 1.0
        with torch.no_grad():
            for parameter in trained.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=learning_rate * factor)
    return {
        "losses": losses,
        "norms": norms,
        "narrow": narrow,
        "rounding": rounding,
        "class": type(plain).__name__,
        "trained": sum(p.numel() for p in trained.parameters() if p.requires_grad),
        "total": sum(p.numel() for p in trained.parameters()),
    }


def reload(export: str, precision: str, output: str, adapter_of: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Open an export as any user would and write what is in it, under the names of its modules.

    Args:
        export: a directory that `from_pretrained` opens; with `adapter_of` one of PEFT's.
        precision: dtype to open it in.
        output: a file for the weights.
        adapter_of: the base of an adapter, as `model` of `run`.

    Returns:
        "names" of the parameters, tied ones once; of an adapter, those that it brings.
    """
    if adapter_of is None:
        trained = _load({"path": export}, precision, "cpu")
        named = dict(trained.named_parameters())
    else:
        from peft import PeftModel

        base = _load(adapter_of, precision, "cpu")
        opened = PeftModel.from_pretrained(base, export, is_trainable=True, autocast_adapter_dtype=False)
        trained = opened
        named = {name: p for name, p in opened.named_parameters() if p.requires_grad} | _own_file(opened, Path(export))
    return {"names": _write(trained, named, Path(output))}


def _write(model: nn.Module, values: Mapping[str, torch.Tensor], file: Path) -> list[str]:
    """Write values of a model's parameters, and return their names, without what PEFT puts around them.

    What PEFT adapts of fused experts it lays as matrices, [experts x rank, inputs] and [outputs, rank x experts]; here
    every expert has its own: "EXPERTS.lora.WEIGHT.lora_A.weight" [experts, rank, inputs], B [experts, outputs, rank].
    """
    experts = {
        name: module for name, module in model.named_modules() if type(module).__name__ == "ParamWrapper"
    }  # a name holds a ".base_layer" for each wrapper around it
    plain = {}
    for name, value in values.items():
        wrapper = re.fullmatch(r"(.*)\.lora_([AB])\.default\.weight", name)
        module: Any = experts.get(wrapper[1]) if wrapper is not None else None
        if wrapper is not None and module is not None and module.get_param().dim() == 3:
            name = f"{wrapper[1]}.lora.{module.parameter_name}.lora_{wrapper[2]}.weight"
            count = module.num_experts
            if wrapper[2] == "A":
                value = value.reshape(count, -1, value.shape[1])
            else:
                value = value.reshape(value.shape[0], -1, count).permute(2, 0, 1)
        for part in ("base_model.model.", ".base_layer", ".modules_to_save.default", ".default"):
            name = name.replace(part, "")
        plain[name] = value.detach().cpu().contiguous().clone()
    save_file(plain, file)
    return list(plain)


def _load(model: Mapping[str, Any], precision: str, device: str) -> Any:
    arguments: dict[str, Any] = {"dtype": getattr(torch, precision)}
    if precision == "float64":
        arguments["experts_implementation"] = "eager"  # grouped matrix products refuse float64
    for name in ("gguf_file", "revision"):
        if model.get(name):
            arguments[name] = model[name]
    loaded: Any = AutoModelForCausalLM.from_pretrained(model["path"], **arguments)
    return loaded.to(device).eval()


def _adapted(model: Any, adapter: Mapping[str, Any]) -> Any:
    from peft import LoraConfig, PeftModel, get_peft_model

    directory = Path(adapter["directory"])
    if (directory / "adapter_config.json").is_file():
        opened = PeftModel.from_pretrained(model, str(directory), is_trainable=True, autocast_adapter_dtype=False)
        with torch.no_grad():
            for name, value in _own_file(opened, directory).items():
                opened.get_parameter(name).copy_(value)
        return opened
    modules = list(adapter["modules"])
    if model.config.model_type in _MAMBAS:
        modules = [name for name in modules if not name.endswith("out_proj")]
    config = LoraConfig(
        r=adapter["rank"],
        lora_alpha=adapter["alpha"],
        target_modules=modules,
        target_parameters=list(adapter["parameters"]) or None,
        modules_to_save=list(adapter["trained"]) or None,
        use_rslora=adapter["rslora"],
        init_lora_weights=False,  # B is random too, as after some training
    )
    torch.manual_seed(0)
    adapted = get_peft_model(model, config, autocast_adapter_dtype=False)
    adapted.save_pretrained(str(directory))
    return adapted


def _own_file(opened: Any, directory: Path) -> dict[str, torch.Tensor]:
    """Values of an adapter as its file has them, by the names of its parameters: there are types (laguna) whose
    adapters PEFT gives other names when it reads them than when it writes them, so that it cannot open its own files.
    """
    file = load_file(directory / "adapter_model.safetensors")
    keys = {
        name: name.replace(".default.", ".").replace(".modules_to_save.", ".")
        for name, parameter in opened.named_parameters()
        if parameter.requires_grad
    }
    return {name: file[key].to(opened.get_parameter(name).dtype) for name, key in keys.items() if key in file}


def _backward(model: Any, document: Mapping[str, Any], total: float) -> float:
    device = next(model.parameters()).device
    ids = torch.tensor([document["tokens"]], device=device)
    logits = model(input_ids=ids, use_cache=False).logits[0]
    wide = logits if logits.dtype == torch.float64 else logits.float()
    weights = torch.tensor(document["weights"], dtype=wide.dtype, device=device) / total
    loss = (F.cross_entropy(wide, torch.tensor(document["targets"], device=device), reduction="none") * weights).sum()
    loss.backward()
    return float(loss.detach())


class _Widen(TorchFunctionMode):
    """Says float64 wherever a model says fp32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.view, torch.frombuffer):  # the bytes of a file are what they are
            return func(*args, **(kwargs or {}))
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        if func is torch._grouped_mm:  # refuses float64; what Transformers has in its place does not
            return torch.ops.transformers.grouped_mm_fallback(*args[:2], offs=kwargs["offs"])
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


@contextmanager
def widening() -> Iterator[None]:
    """Within it models read and compute in float64 what they would have in fp32, so that two sides which do the same
    agree to float64's own rounding, however many digits fp32 would have left of sums in which large numbers cancel."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Widen():
            yield
    finally:
        torch.set_default_dtype(default)


class _Watch(TorchFunctionMode):
    """Sees whether a float64 model rounds to fp32 on the way.

    Norms do so all the time, harmlessly: the same numbers go in on every layout, and what comes out of them is rounded
    to the same bits, but for one in many millions that lies between two of them. But where a weight is rounded, its
    gradient is summed over positions in fp32, in an order that depends on how rows are cut, and where scores or routing
    are, so are their gradients.
    """

    def __init__(self) -> None:
        super().__init__()
        self.narrow = self.rounding = False
        self.inside_norms = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float32:
            wide = [a for a in args if isinstance(a, torch.Tensor) and a.dtype == torch.float64]
            self.rounding = self.rounding or any(a.requires_grad for a in wide)
            if any(isinstance(a, nn.Parameter) or (a.requires_grad and not self.inside_norms) for a in wide):
                self.narrow = True
        return result


@contextmanager
def _watching(model: nn.Module) -> Iterator[_Watch]:
    watch = _Watch()

    def enter(*_: Any) -> None:
        watch.inside_norms += 1

    def leave(*_: Any) -> None:
        watch.inside_norms -= 1

    norms = [module for module in model.modules() if _NORM.search(type(module).__name__)]
    handles = [module.register_forward_pre_hook(enter) for module in norms]
    handles += [module.register_forward_hook(leave) for module in norms]
    try:
        with watch:
            yield watch
    finally:
        for handle in handles:
            handle.remove()


CALLS: dict[str, Any] = {"make": make, "run": run, "reload": reload}


def serve(requests: TextIO, answers: TextIO) -> None:
    """Answer calls, a line of JSON each: {"call": name, "with": arguments} -> {"answer"} or {"error", "trace"}."""
    torch.set_num_threads(1)
    for line in requests:
        request = json.loads(line)
        try:
            answer = {"answer": CALLS[request["call"]](**request["with"])}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    _out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    serve(sys.stdin, _out)
