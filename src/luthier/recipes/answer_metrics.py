"""How well an answer agrees with the one that was expected: numbers from 0 to 1 of two texts."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

from luthier.config.suggest import nearest
from luthier.errors import ConfigError, UserError, first_line
from luthier.own_code import kind_and_words, module_of, number_of, own_code

Metric = Callable[[str, str], float]
"""metric(prediction, reference) -> number."""

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def exact_match(prediction: str, reference: str) -> float:
    """1 where the two are equal once case, punctuation, articles and white space are set aside, as SQuAD counts
    (Rajpurkar et al. 2016, https://arxiv.org/abs/1606.05250).

    >>> exact_match("The Paris.", "paris")
    1.0
    """
    return float(_normal(prediction) == _normal(reference))


def f1(prediction: str, reference: str) -> float:
    """2 p r / (p + r) over the words that both have, as SQuAD counts; of two empty texts 1.

    >>> f1("in Paris", "Paris")
    0.6666666666666666
    """
    said, expected = _normal(prediction).split(), _normal(reference).split()
    if not said or not expected:
        return float(said == expected)
    same = sum((Counter(said) & Counter(expected)).values())
    return 2 * same / (len(said) + len(expected))


def _normal(text: str) -> str:
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def _rouge(name: str) -> Metric:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise UserError(
            "ROUGE needs rouge-score, which is not installed", where="--metrics", remedy="pip install 'luthier[tasks]'"
        ) from error
    scorer = RougeScorer([name], use_stemmer=True)
    return lambda prediction, reference: float(scorer.score(reference, prediction)[name].fmeasure)


_NAMES: dict[str, Callable[[], Metric]] = {
    "exact_match": lambda: exact_match,
    "f1": lambda: f1,
    **{name: lambda name=name: _rouge(name) for name in ("rouge1", "rouge2", "rougeL")},  # type: ignore[misc]
}


def find_metrics(names: Sequence[str]) -> dict[str, Metric]:
    """Metrics by name: exact_match, f1, rouge1, rouge2, rougeL, or package.module:function or FILE.py:function of one's
    own.

    A function of one's own takes prediction and reference as texts and gives a number.

    Raises:
        UserError: there is no such metric, it cannot be imported, or its library is not installed.
    """
    found: dict[str, Metric] = {}
    for name in names:
        if name in _NAMES:
            found[name] = _NAMES[name]()
        elif ":" in name:
            found[name] = _own(name)
        else:
            close = nearest(name, list(_NAMES))
            known = f"there are {', '.join(_NAMES)}, package.module:function and FILE.py:function"
            raise ConfigError(
                f"there is no metric {name!r}",
                where="--metrics",
                remedy=f"did you mean {close!r}?" if close else known,
            )
    return found


def _own(name: str) -> Metric:
    module, _, function = name.partition(":")

    def fault(error: BaseException) -> ConfigError:
        why = first_line(error) if isinstance(error, ImportError | AttributeError) else kind_and_words(error)
        return ConfigError(f"metric {name!r} cannot be imported ({why})", where="--metrics")

    with own_code(fault):
        own: Callable[[str, str], object] = getattr(module_of(module), function)

    def measured(prediction: str, reference: str) -> float:
        value = own(prediction, reference)
        if not isinstance(value, int | float):
            kind = type(value).__name__
            raise ConfigError(f"{name} gave {kind}, not a number", where="--metrics")
        return number_of(value)

    return measured
