"""Needles and free generation: can a model still find a fact in a past that was quantized, and how
long does it write what it would have written?"""

from __future__ import annotations

import random
from typing import Callable, Dict, List, NamedTuple, Sequence, Tuple

from .choices import Choice
from .language_model import LanguageModel
from .likelihood import Text
from .past import read_back

PLACES = ("Lisbon", "Oslo", "Madrid", "Cairo", "Tokyo", "Berlin", "Dublin", "Delhi", "Rome")
NEEDLES_PER_TEXT = len(PLACES)


class Needle(NamedTuple):
    question: str
    answer: str


class Haystack(NamedTuple):
    ids: List[int]
    needles: List[Needle]


def needles(seed: int) -> List[Needle]:
    rng = random.Random(seed)
    return [
        Needle(f"\nThe secret number of {place} is", f" {rng.randrange(10000, 99999)}")
        for place in PLACES
    ]


def hide(model: LanguageModel, text: Text, num_tokens: int, seed: int) -> Haystack:
    """The text's beginning with the needles at nine depths, `num_tokens` together (fewer where the
    text is shorter)."""
    hidden = needles(seed)
    inserts = [model.tokens(n.question + n.answer + ".\n", is_whole=False) for n in hidden]
    hay = text.ids[: num_tokens - sum(len(insert) for insert in inserts)]
    ids: List[int] = []
    for i, insert in enumerate(inserts):
        begin, end = (len(hay) * (2 * j + 1) // (2 * len(inserts)) for j in (i - 1, i))
        ids += hay[max(begin, 0) : end] + insert
    ids += hay[len(hay) * (2 * len(inserts) - 1) // (2 * len(inserts)) :]
    return Haystack(ids, hidden)


def count_found(
    model: LanguageModel,
    texts: Sequence[Text],
    choices: Sequence[Choice],
    *,
    num_tokens: int = 1024,
    progress: Callable[[str], None] = lambda line: None,
) -> Tuple[int, int, Dict[str, int]]:
    """(needles, found with the exact past, found by choice). A needle is found when every token of
    its answer is the most likely one, so when greedy decoding would write it."""
    num_exact, found = 0, {choice.text: 0 for choice in choices}
    for seed, text in enumerate(texts):
        haystack = hide(model, text, num_tokens, seed)
        past = model.prefill(haystack.ids)
        num_exact += _count(model, past, haystack)
        for choice in choices:
            found[choice.text] += _count(model, read_back(past, choice), haystack)
        progress(f"{text.name}: {len(haystack.needles)} needles")
    return len(texts) * NEEDLES_PER_TEXT, num_exact, found


def _count(model: LanguageModel, past: object, haystack: Haystack) -> int:
    found = 0
    for needle in haystack.needles:
        question = model.tokens(needle.question, is_whole=False)
        ids = model.tokens(needle.question + needle.answer, is_whole=False)
        best = model.log_probs(past, ids[:-1]).argmax(-1).tolist()
        found += best[len(question) - 1 :] == ids[len(question) :]
    return found


def agreement(
    model: LanguageModel,
    texts: Sequence[Text],
    choices: Sequence[Choice],
    *,
    history: int = 1024,
    num_tokens: int = 1000,
    progress: Callable[[str], None] = lambda line: None,
) -> Dict[str, List[int]]:
    """For each text the number of tokens, of `num_tokens`, that greedy decoding after a quantized
    past writes as after the exact one, before the first other one.

    Up to that token both read the same ids, so one pass over the exact continuation finds it.
    """
    lengths: Dict[str, List[int]] = {choice.text: [] for choice in choices}
    for text in texts:
        past = model.prefill(text.ids[:history])
        written = model.continue_greedily(past, text.ids[history], num_tokens)
        for choice in choices:
            best = model.best_tokens(read_back(past, choice), written[:-1])
            same = [a == b for a, b in zip(best, written[1:])]
            lengths[choice.text].append(same.index(False) if False in same else num_tokens)
        progress(f"{text.name}: {num_tokens} tokens written")
    return lengths
