"""`luthier evaluate`: the loss of a model on held-out rows, its answers to them, and its score at tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from luthier.config import RunConfig
from luthier.config.kinds import kind_of
from luthier.data.loader import Rows, build_rows
from luthier.engine.evaluate import evaluate as measure
from luthier.engine.network import Network
from luthier.errors import ConfigError, DataError
from luthier.hf.source import named_in
from luthier.launch import join
from luthier.parallel.mesh import Mesh
from luthier.recipes.answer_metrics import Metric, find_metrics
from luthier.recipes.answers import answers_to, measured, questions_of
from luthier.recipes.setup import held_out_batches, inference_network, meshed, prepare_process, tokenizer_of
from luthier.report.progress import stage
from luthier.report.side_by_side import COLUMNS, form_of, write_side_by_side


@dataclass(frozen=True)
class Wanted:
    """What is measured beside the loss.

    Attributes:
        tasks: names of lm-evaluation-harness's tasks, or task files.
        few_shot: worked examples before each question of a task; as the task says when None.
        limit: the first so many questions of each task.
        chat: put a task's questions as turns of the chat template.
        metrics: of answers to the held-out rows.
        side_by_side: a file for the answers of two models.
        base: whose answers stand beside; with an adapter the model without it when None.
    """

    tasks: Sequence[str] = ()
    few_shot: int | None = None
    limit: int | None = None
    chat: bool = False
    metrics: Sequence[str] = ()
    side_by_side: Path | None = None
    base: str | None = None

    @property
    def answers(self) -> bool:
        """Whether the model is asked the held-out rows."""
        return bool(self.metrics or self.side_by_side)


def evaluate(config: RunConfig, *, adapter: Path | None = None, wanted: Wanted | None = None) -> dict[str, Any]:
    """Measure a model on every validation row once, and at whatever else is wanted.

    Args:
        config: names the model, the data, the precision and how to sample; how it trains is not looked at.
        adapter: a directory of PEFT files to put on the model.
        wanted: tasks, metrics of answers, answers side by side; the loss alone when left out.

    Returns:
        model, adapter; where there are validation rows loss (nats a token), perplexity, rows, tokens, trained_tokens
        and `data`, what became of the rows; `tasks`: task -> metric -> value; `answers`: metric -> mean over the rows,
        of the model and, where answers stand side by side, of the base.

    Raises:
        ConfigError: there is no such task, metric or form of file, or nothing to measure on.
        DataError: no row can be measured.
    """
    wanted = wanted or Wanted()
    has_rows = config.data.validation is not None or config.data.validation_fraction is not None
    if (kind := kind_of(config.data)) != "documents":
        if not wanted.tasks or wanted.answers:
            what = f"the rows of method {config.method.name} are {kind}, and documents are what is measured"
            remedy = (
                "the run measures its own held-out rows; for others set method=sft and name them in data.validation"
            )
            raise ConfigError(what, where="method", remedy=remedy)
        has_rows = False
    with join(prepare_process(config)) as device, meshed(config, device, any_number=True) as mesh:
        _check(wanted, has_rows, adapter, mesh)
        metrics = find_metrics(wanted.metrics)
        run_tasks = _prepared(wanted, config.seed)
        tokenizer = tokenizer_of(config, adapter)
        alone = wanted.side_by_side is not None and wanted.base is None
        if alone and tokenizer.get_vocab() != tokenizer_of(config).get_vocab():
            what = "the adapter brings tokens that the model without it does not have"
            raise ConfigError(what, where="--side-by-side", remedy="name a model that has them with --base")
        rows = _rows(config, tokenizer) if has_rows or not wanted.tasks else None
        network = inference_network(config, device, adapter, mesh)
        result: dict[str, Any] = {"model": config.model, "adapter": str(adapter) if adapter else None}
        if rows is not None:
            batches = held_out_batches(network, rows, config)
            with stage("evaluating") as told:
                loss = measure(network, batches, progress=lambda done: told(done, len(rows)))
            if not loss.trained_tokens:
                remedy = "look with luthier data show"
                raise DataError("no row has a token that counts", where="data.validation", remedy=remedy)
            result |= loss.to_dict()
        if run_tasks is not None:
            result["tasks"] = run_tasks(network, tokenizer)
        if rows is not None and wanted.answers:
            result["answers"] = _asked(config, wanted, metrics, network, tokenizer, rows)
    if rows is not None:
        result["data"] = rows.report.to_dict()
    return result


def _check(wanted: Wanted, has_rows: bool, adapter: Path | None, mesh: Mesh | None) -> None:
    if wanted.answers and not has_rows:
        raise ConfigError("there are no rows to ask", where="data.validation", remedy="name a file there, or --data")
    if mesh is not None and (wanted.answers or wanted.tasks):
        where = "--tasks" if wanted.tasks else "--metrics"
        raise ConfigError("answers are made in one process", where=where, remedy="leave --nproc out")
    if wanted.side_by_side is not None:
        form_of(wanted.side_by_side)
        if adapter is None and wanted.base is None:
            remedy = "name one with --base, or the adapter with --adapter"
            raise ConfigError("there is no second model to stand beside", where="--side-by-side", remedy=remedy)
    elif wanted.base is not None:
        raise ConfigError("is for answers side by side", where="--base", remedy="name their file with --side-by-side")


def _prepared(wanted: Wanted, seed: int) -> Callable[[Network, Any], dict[str, Any]] | None:
    """The tasks found, so that a name that is none is refused before the model is loaded."""
    if not wanted.tasks:
        return None
    from luthier.recipes.harness import find_tasks, run_tasks

    names, manager = find_tasks(wanted.tasks)

    def run(network: Network, tokenizer: Any) -> dict[str, Any]:
        how: dict[str, Any] = {"few_shot": wanted.few_shot, "limit": wanted.limit, "chat": wanted.chat, "seed": seed}
        return run_tasks(network, tokenizer, names, manager, **how)

    return run


def _rows(config: RunConfig, tokenizer: Any) -> Rows:
    with stage("tokenising") as told:
        rows = build_rows(config.data, "validation", tokenizer, seed=config.seed, progress=told)
    return rows.first(config.evaluation.rows) if config.evaluation.rows is not None else rows


def _asked(
    config: RunConfig, wanted: Wanted, metrics: Mapping[str, Metric], network: Network, tokenizer: Any, rows: Rows
) -> dict[str, Any]:
    """Metric -> mean of the answers to the rows; side by side, of both models."""
    if rows.pictures:
        what = "answers to rows with images are not generated"
        raise ConfigError(what, where="--metrics", remedy="measure the loss alone")
    questions = questions_of(rows, tokenizer)
    how: dict[str, Any] = {"config": config.generation, "seed": config.seed}
    tuned = answers_to(network.model, tokenizer, questions, title="answering", **how)
    scores = {"tuned": measured(metrics, questions, tuned)}
    means: dict[str, Any] = {name: _mean(values) for name, values in scores["tuned"].items()}
    if wanted.side_by_side is None:
        return {"rows": len(questions), **means}
    other = (
        config
        if wanted.base is None
        else config.model_copy(update={"model": wanted.base, "revision": None, "tokenizer": None})
    )
    where = "--base" if wanted.base is not None else "model"
    with named_in(where):
        others = tokenizer_of(other)
    if wanted.base is not None:
        own = tokenizer.get_vocab()
        if any(own.get(token) != place for token, place in others.get_vocab().items()):
            remedy = "name a model of the same tokenizer"
            raise ConfigError(f"{wanted.base} has other tokens than {config.model}", where="--base", remedy=remedy)
    with named_in(where):
        base_model = inference_network(other, network.device, None).model
    base = answers_to(base_model, others, questions, title="answering without the training", **how)
    scores["base"] = measured(metrics, questions, base)
    beside = [
        {
            "row": question.origin,
            **dict(zip(COLUMNS, (question.prompt, question.expected, base[i], tuned[i]), strict=True)),
            "scores": {side: {name: values[i] for name, values in found.items()} for side, found in scores.items()},
        }
        for i, question in enumerate(questions)
    ]
    summary = {side: {name: _mean(values) for name, values in found.items()} for side, found in scores.items()}
    title = f"{other.model} and what was made of it"
    write_side_by_side(wanted.side_by_side, beside, summary, title)
    return {"rows": len(questions), **means, "base": summary["base"], "side_by_side": str(wanted.side_by_side)}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
