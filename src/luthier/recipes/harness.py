"""Tasks of lm-evaluation-harness, asked of the model in memory: `luthier evaluate --tasks`.

The harness asks for log-probabilities of continuations and for texts; both come from the model as it lies in memory,
adapters in place, several texts in one row. What a task is, how it is worded and counted is the harness's own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from luthier.config.suggest import nearest
from luthier.engine.network import Network
from luthier.engine.scoring import Continuation, score
from luthier.errors import ConfigError, UserError
from luthier.hf.tokenizer import encode_text, render_text
from luthier.report.progress import stage
from luthier.sampling.engine import SLOTS, SamplingEngine
from luthier.sampling.request import SamplingRequest

try:
    from lm_eval.api.model import TemplateLM
except ImportError as error:
    raise UserError(
        "tasks need lm-evaluation-harness, which is not installed",
        where="--tasks",
        remedy="pip install 'luthier[tasks]'",
    ) from error

LONGEST = 2048
"""Tokens of the longest text where the model sets no bound: of what is longer the beginning is cut off."""
MAX_NEW_TOKENS = 256
"""Of a text, where its task says nothing."""
BOOTSTRAPS = 1000
"""Samples that the standard error of metrics without a formula is estimated from."""


def find_tasks(asked: Sequence[str]) -> tuple[list[str], Any]:
    """The tasks that are meant, before a model is loaded.

    Args:
        asked: names of the harness's tasks and groups, patterns of them, or YAML files of one's own.

    Returns:
        their names, and the harness's own index of tasks.

    Raises:
        ConfigError: there is no such task or file.
    """
    from lm_eval.tasks import TaskManager

    files = [name for name in asked if name.endswith((".yaml", ".yml"))]
    own = {name: _task_of(Path(name)) for name in files}
    manager = TaskManager(include_path=list(dict.fromkeys(str(Path(name).resolve().parent) for name in files)))
    names: list[str] = []
    for name in asked:
        found = [own[name]] if name in own else manager.match_tasks([name])
        if not found:
            close = nearest(name, manager.all_tasks)
            remedy = f"did you mean {close!r}?" if close else "name one of the harness's tasks, or a YAML file"
            raise ConfigError(f"there is no task {name!r}", where="--tasks", remedy=remedy)
        names += found
    return list(dict.fromkeys(names)), manager


class _PlainLoader(yaml.SafeLoader):
    """Reads the plain keys of a task file and passes over the harness's own tags (!function)."""


_PlainLoader.add_multi_constructor("!", lambda *_: None)


def _task_of(path: Path) -> str:
    """The name that a task file gives its task."""
    try:
        told = yaml.load(path.read_text(encoding="utf-8"), _PlainLoader)
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise ConfigError(f"it cannot be read: {reason}", where=str(path), remedy="name a task file") from error
    name = told.get("task") if isinstance(told, Mapping) else None
    if not isinstance(name, str):
        raise ConfigError("it names no task", where=str(path), remedy="give it a key `task`")
    return name


def run_tasks(
    network: Network,
    tokenizer: Any,
    names: Sequence[str],
    manager: Any,
    *,
    few_shot: int | None = None,
    limit: int | None = None,
    chat: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    """What a model scores at tasks.

    Args:
        network: in one process.
        tokenizer: the model's own.
        names: what `find_tasks` gave.
        manager: what `find_tasks` gave.
        few_shot: worked examples before each question; as the task says when left out.
        limit: the first so many questions of each task; all when left out.
        chat: put each question as a user's turn of the chat template.
        seed: of the choice of examples.

    Returns:
        task -> metric -> value, with the standard error as `METRIC_stderr`; `samples`, how many questions it has.

    Raises:
        UserError: a task cannot be read or asked.
    """
    from lm_eval.evaluator import evaluate

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    try:
        loaded = manager.load(list(names))
        for task in loaded["tasks"].values():
            if task.get_config("num_fewshot") is None or (few_shot is not None and task.get_config("num_fewshot") != 0):
                task.set_config(key="num_fewshot", value=few_shot or 0)
            task.set_fewshot_seed(seed=seed)
        told: Any = evaluate(
            lm=HarnessModel(network, tokenizer, seed=seed),
            task_dict=loaded,
            limit=limit,
            apply_chat_template=chat,
            fewshot_as_multiturn=chat,
            log_samples=False,
            bootstrap_iters=BOOTSTRAPS,
        )
    except UserError:
        raise
    # of a task or of its data, which are anybody's
    except (OSError, ValueError, KeyError, TypeError, AssertionError, ImportError) as error:
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"the harness cannot run {', '.join(names)}: {first}", where="--tasks") from error
    counts = told.get("n-samples", {})
    found: dict[str, Any] = {}
    for name, values in told["results"].items():
        # what the harness measures is called "metric,filter"; beside it stand the names and sizes of the task
        measured = {_metric(key): value for key, value in values.items() if "," in key and value != "N/A"}
        if samples := counts.get(name, {}).get("effective"):
            measured["samples"] = samples
        found[name] = measured
    return found


def _metric(key: str) -> str:
    """The harness's "acc,none" as "acc", "exact_match,strict-match" as "exact_match (strict-match)"."""
    name, _, kind = key.partition(",")
    return name if kind in ("", "none") else f"{name} ({kind})"


class HarnessModel(TemplateLM):
    """A network as the harness sees a model.

    Args:
        network: in one process.
        tokenizer: the model's own.
        seed: of texts that are sampled.
    """

    def __init__(self, network: Network, tokenizer: Any, *, seed: int = 0) -> None:
        super().__init__()
        if tokenizer.eos_token_id is None:
            raise ConfigError("it has no token that ends a text, which tasks need", where="tokenizer")
        self.tokenizer = tokenizer
        self._network = network
        self._seed = seed
        limits = network.limits
        self.max_length = (limits.positions if limits is not None else None) or LONGEST

    @property
    def eot_token_id(self) -> int:
        """What ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without a context."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else int(first)

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Ids of a text; a BOS where the tokenizer puts one by itself and the text has none."""
        bos = self.tokenizer.bos_token
        if add_special_tokens is False or (add_special_tokens is None and bos and string.startswith(bos)):
            return list(self.tokenizer(string, add_special_tokens=False)["input_ids"])
        return encode_text(self.tokenizer, string)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation that the model is to answer, or whose last turn it is to go on with."""
        return render_text(
            self.tokenizer,
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Log-probability of continuations, and whether each is the likeliest.

        Raises:
            UserError: one has no token of its own; names the request.
        """
        for request in requests:
            context, answer = request.args
            if context == "" and not self.tok_encode(answer, add_special_tokens=False):
                raise _unscorable(context, answer)
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        return found

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        most = self.max_length
        asked = []
        for request, context, answer in requests:
            if not context or not answer:  # where the harness's own model fails an assertion
                raise _unscorable(*request)
            kept = (context + answer)[-(most + 1) :]
            inside = min(len(answer), len(kept) - 1)
            asked.append(Continuation(tuple(kept[:-inside]), tuple(kept[-inside:])))
        with stage("scoring answers") as told:
            found = score(self._network, asked, progress=lambda done: told(done, len(asked)))
        return [(one.logprob, one.greedy) for one in found]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of whole texts; long ones in windows that together predict each token once."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        windows: list[tuple[Any, list[int], list[int]]] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1):
                context, answer = make_disjoint_window(window)
                windows.append((None, list(context), list(answer)))
                owners.append(number)
        sums = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            sums[owner] += logprob
        return sums

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts up to the first of some endings, which are not part of them."""
        engine = SamplingEngine(self._network.model, tokenizer=self.tokenizer, slots=min(SLOTS, max(1, len(requests))))
        numbers: dict[int, tuple[int, list[str]]] = {}
        for number, request in enumerate(requests):
            prompt, how = request.args
            until = _endings(how.get("until"))
            numbers[engine.submit(self._request(prompt, how, until, self._seed + number))] = number, until
        texts = [""] * len(requests)
        with stage("answering") as told:
            done = 0
            while engine.busy:
                for ended in engine.step():
                    number, until = numbers[ended]
                    texts[number] = self._text(engine.result(ended).tokens, until)
                    done += 1
                    told(done, len(requests))
        return texts

    def _request(self, prompt: str, how: Mapping[str, Any], until: Sequence[str], seed: int) -> SamplingRequest:
        room = int(how.get("max_gen_toks", how.get("max_new_tokens", MAX_NEW_TOKENS)))
        temperature = float(how.get("temperature", 0.0) or 0.0)
        if how.get("do_sample") and not temperature:
            temperature = 1.0
        stop: Any = [self.eot_token_id, *until]
        return SamplingRequest(
            self.tok_encode(prompt)[-max(1, self.max_length - room) :],
            room,
            temperature=temperature,
            top_k=int(how.get("top_k", 0) or 0),
            top_p=float(how.get("top_p", 1.0) or 1.0),
            seed=seed,
            stop=stop,
        )

    def _text(self, tokens: Sequence[int], until: Sequence[str]) -> str:
        kept = list(tokens[:-1]) if tokens and tokens[-1] == self.eot_token_id else list(tokens)
        text = str(self.tokenizer.decode(kept, skip_special_tokens=True))
        for ending in until:
            text = text.split(ending)[0]
        return text


def _unscorable(context: str, answer: str) -> UserError:
    """What is said of a request that has no token to score, or none to score it after."""
    return UserError(
        f"the answer {answer!r} to {'...' * (len(context) > 80)}{context[-80:]!r} cannot be scored: it adds "
        "no token to those of its question, or those are none",
        where="--tasks",
        remedy="end the task's questions where a token ends (see its target_delimiter), and give each choice a text",
    )


def _endings(until: Any) -> list[str]:
    if until is None:
        return []
    return [until] if isinstance(until, str) else [str(ending) for ending in until if ending]
