"""Perplexity and next-token KL of texts that are read on against a past from the store."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Sequence

from ..errors import InvalidArgumentError
from .choices import Choice
from .language_model import LanguageModel
from .past import read_back


class Text(NamedTuple):
    name: str
    ids: List[int]


def read_texts(model: LanguageModel, files: Sequence[str]) -> List[Text]:
    """Named by their files, without folders where that is enough."""
    names = [pathlib.Path(file).stem for file in files]
    unique = names if len(set(names)) == len(names) else files
    return [
        Text(name, model.tokens(pathlib.Path(file).read_text(encoding="utf-8")))
        for name, file in zip(unique, files)
    ]


class Mean(NamedTuple):
    value: float
    error: float  # standard error


@dataclasses.dataclass
class Scores:
    """Per scored token, exact and quantized."""

    exact_nll: List[float] = dataclasses.field(default_factory=list)
    nll: List[float] = dataclasses.field(default_factory=list)
    kl: List[float] = dataclasses.field(default_factory=list)
    is_same_first: List[bool] = dataclasses.field(default_factory=list)

    def add(self, exact: Any, other: Any, next_ids: Sequence[int]) -> None:
        """Log-probabilities [tokens, words] of both, and the tokens that follow in the text."""
        import torch

        targets = torch.tensor(next_ids)[:, None]
        difference = exact - other
        kl = (exact.exp() * difference).sum(-1, dtype=torch.float64)
        self.exact_nll += (-exact.gather(1, targets)[:, 0]).tolist()
        self.nll += (-other.gather(1, targets)[:, 0]).tolist()
        self.kl += kl.tolist()
        self.is_same_first += (exact.argmax(-1) == other.argmax(-1)).tolist()

    @staticmethod
    def total(parts: Iterable[Scores]) -> Scores:
        """All tokens of all parts."""
        total = Scores()
        for part in parts:
            for field in dataclasses.fields(part):
                getattr(total, field.name).extend(getattr(part, field.name))
        return total

    @property
    def num_tokens(self) -> int:
        return len(self.kl)

    def perplexity(self) -> float:
        return math.exp(_mean(self.exact_nll).value)

    def perplexity_change(self) -> Mean:
        """Relative, paired: of the mean difference of each token's negative log-likelihood."""
        mean = _mean([b - a for a, b in zip(self.exact_nll, self.nll)])
        return Mean(math.expm1(mean.value), math.exp(mean.value) * mean.error)

    def mean_kl(self) -> Mean:
        """KL(exact || quantized) in nats."""
        return _mean(self.kl)

    def same_first(self) -> float:
        """Share of tokens at which both find the same word the most likely."""
        return _mean([float(same) for same in self.is_same_first]).value


def _mean(values: Sequence[float]) -> Mean:
    count = len(values)
    mean = math.fsum(values) / count
    variance = math.fsum((value - mean) ** 2 for value in values) / max(count - 1, 1)
    return Mean(mean, math.sqrt(variance / count))


def histories_of(text: Text, histories: Sequence[int], num_scored: int) -> List[int]:
    """The histories after which enough of the text is left. Raises where there is none."""
    fitting = [history for history in histories if len(text.ids) > history + num_scored]
    if not fitting:
        raise InvalidArgumentError(
            f"{text.name}: {len(text.ids)} tokens, want at least "
            f"{min(histories) + num_scored + 1}: a history of {min(histories)}, {num_scored} to "
            "score and the one after"
        )
    return fitting


def score_texts(
    model: LanguageModel,
    texts: Sequence[Text],
    choices: Sequence[Choice],
    *,
    histories: Sequence[int] = (1024, 2048),
    num_scored: int = 160,
    progress: Callable[[str], None] = lambda line: None,
) -> Dict[str, Dict[str, Scores]]:
    """Scores by choice (its text) and by text (its name)."""
    scores = {choice.text: {text.name: Scores() for text in texts} for choice in choices}
    for text in texts:
        fitting = histories_of(text, histories, num_scored)
        whole = model.prefill(text.ids[: max(fitting)])
        for history in fitting:
            past = whole.first(history)
            ids = text.ids[history : history + num_scored]
            next_ids = text.ids[history + 1 : history + num_scored + 1]
            exact = model.log_probs(past, ids)
            for choice in choices:
                other = model.log_probs(read_back(past, choice), ids)
                scores[choice.text][text.name].add(exact, other, next_ids)
            progress(f"{text.name}: history {history}, {len(choices)} choices")
    return scores
