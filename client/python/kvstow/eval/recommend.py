"""python -m kvstow.eval.recommend MODEL --docs FILES (--max-ppl 1% | --budget 3.2bpv) [-o plan.txt]

A codec for each layer's keys and values, found on a language model that reads its quantized past
back. `kvstow recommend` does the same from KV files, by attention; this one asks the model.

What a plane costs is measured: the next-token KL when that plane alone has two bits. More bits cut
it as they cut the error energy of Gaussian rows. KL adds up over planes, so each step goes to the
plane that gains most for its bits; some keys do better with their mean than without. With --max-ppl
the least bits are looked for whose plan, measured whole, keeps the perplexity within the limit by
one standard error.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import sys
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from ..codecs import PlaneCodec
from ..errors import Error, InvalidArgumentError
from .choices import ROLES, Choice, planes
from .language_model import LanguageModel
from .likelihood import Scores, Text, read_texts, score_texts

Place = Tuple[str, int]  # role, layer

MEASURED: Dict[str, Tuple[str, ...]] = {"k": ("tq2", "tqm2"), "v": ("tq2",)}
# What follows for more bits: the error energy of Gaussian rows under Lloyd-Max levels (Max,
# "Quantizing for minimum distortion", 1960, table 1), over that at two bits.
ENERGY = {2: 1.0, 3: 0.0345 / 0.1175, 4: 0.0095 / 0.1175}
# Where four bits are not enough. int8 costs next to nothing, raw nothing.
BEYOND = {"int8": 1e-4, "raw": 0.0}
STEP_BITS = 1 / 16  # of the search for a limit of perplexity


class Plan(NamedTuple):
    codecs: Dict[Place, str]
    bits: float  # per value
    kl: float  # expected, by the sum over planes

    def pair(self) -> str:
        """The most common codec of each role, as `--codec` takes it."""
        return ",".join(f"{role}={self._common(role)}" for role in ROLES)

    def lines(self) -> List[str]:
        """The layers that differ from pair(), as `kvstow put --plan` takes them."""
        return [
            f"layer{layer}.{role}={codec}"
            for role in ROLES
            for (other, layer), codec in sorted(self.codecs.items())
            if other == role and codec != self._common(role)
        ]

    def _common(self, role: str) -> str:
        codecs = [codec for (other, _), codec in sorted(self.codecs.items()) if other == role]
        return max(sorted(set(codecs)), key=codecs.count)


class CostTable:
    """Cost and size of each codec at each place."""

    def __init__(self, measured: Dict[Tuple[str, int, str], float], dim: int, block: int):
        """measured: KL by role, layer and codec of MEASURED, that plane alone."""
        self._costs: Dict[Place, Dict[str, float]] = {}
        self._bits: Dict[Place, Dict[str, float]] = {}
        for (role, layer, codec), kl in measured.items():
            options = self._costs.setdefault((role, layer), {})
            family = codec.rstrip("2")
            options.update({f"{family}{bits}": kl * share for bits, share in ENERGY.items()})
            for other, share in BEYOND.items():
                options[other] = min(kl * share, options.get(other, kl))
        sizes: Dict[Tuple[str, str], float] = {}
        for place, options in self._costs.items():
            for codec in options:
                key = (place[0], codec)
                if key not in sizes:
                    made = PlaneCodec(codec, place[0], dim, tokens_per_block=block)
                    sizes[key] = made.bits_per_value
                self._bits.setdefault(place, {})[codec] = sizes[key]

    def least_bits(self) -> float:
        return sum(min(bits.values()) for bits in self._bits.values()) / len(self._bits)

    def plan(self, budget: float) -> Plan:
        """The best that fits `budget` bits per value. InvalidArgumentError below least_bits()."""
        if budget < self.least_bits():
            raise InvalidArgumentError(
                f"--budget is {budget:g} bits per value, the least here is {self.least_bits():.3f}"
            )
        # Of equal size the cheaper one: keys with their mean, or without.
        chosen = {
            place: min(bits, key=lambda codec: (bits[codec], self._costs[place][codec]))
            for place, bits in self._bits.items()
        }
        left = budget * len(chosen) - sum(self._bits[at][codec] for at, codec in chosen.items())
        while True:
            steps = [
                ((self._costs[at][codec] - self._costs[at][other]) / step, at, other, step)
                for at, codec in chosen.items()
                for other, size in self._bits[at].items()
                for step in [size - self._bits[at][codec]]
                if 0 < step <= left + 1e-9
            ]
            best = max(steps, default=None)
            if best is None or best[0] <= 0:
                break
            _, place, other, step = best
            left -= step
            chosen[place] = other
        bits = sum(self._bits[at][codec] for at, codec in chosen.items()) / len(chosen)
        return Plan(chosen, bits, sum(self._costs[at][codec] for at, codec in chosen.items()))


def measure_planes(
    model: LanguageModel, texts: Sequence[Text], **options: Any
) -> Dict[Tuple[str, int, str], float]:
    """KL by role, layer and codec, that plane alone. `options` as for score_texts."""
    num_layers = model.prefill(texts[0].ids[:1]).num_layers
    words = {
        f"raw,layer{layer}.{role}={codec}": (role, layer, codec)
        for role, layer in planes(num_layers)
        for codec in MEASURED[role]
    }
    scores = score_texts(model, texts, [Choice.parse(word) for word in words], **options)
    return {place: Scores.total(scores[word].values()).mean_kl().value for word, place in words.items()}


def least_bits_within(
    table: CostTable, limit: float, change_of: Callable[[Plan], Tuple[float, float]]
) -> Optional[Plan]:
    """The plan of fewest bits whose perplexity changes by at most `limit`, with its standard error
    on top; None where none does. change_of: (change, standard error) of a plan, measured. Looks by
    halves, as if more bits were never worse: what it returns was measured within the limit."""
    least = table.least_bits()
    # Where four bits more do not do, something needs eight or sixteen.
    for low, high in ((least, least + 4), (least + 4, 16.0)):
        found = None
        num_steps = round((high - low) / STEP_BITS)
        begin, end = 0, num_steps + 1
        while begin < end:
            middle = (begin + end) // 2
            plan = table.plan(low + middle * STEP_BITS)
            change, error = change_of(plan)
            if change + error <= limit:
                found, end = plan, middle
            else:
                begin = middle + 1
        if found is not None:
            return found
    return None


def _number(text: str, suffix: str) -> float:
    match = re.fullmatch(rf"([0-9]*\.?[0-9]+)({suffix})?", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r}, want a number, as 1.5 or 1.5{suffix}")
    return float(match.group(1))


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("kvstow.eval.recommend", description=__doc__.split("\n\n")[1])
    parser.add_argument("model", help="a model of the hub, a folder, or a GGUF file")
    parser.add_argument("--docs", nargs="+", required=True, metavar="FILE",
                        help="texts to choose on")
    goal = parser.add_mutually_exclusive_group(required=True)
    goal.add_argument("--max-ppl", metavar="PERCENT", type=lambda text: _number(text, "%"),
                      help="the perplexity may grow by this: 1%%")
    goal.add_argument("--budget", metavar="BITS", type=lambda text: _number(text, "bpv"),
                      help="bits per value: 3.2bpv")
    parser.add_argument("--check-docs", nargs="+", default=[], metavar="FILE",
                        help="texts to judge the plan on, others than those it was chosen on")
    parser.add_argument("--block", type=int, default=64, help="tokens per block")
    parser.add_argument("--dim", type=int, default=0, help="count bits as at this head dim")
    parser.add_argument("--history", type=int, default=512, help="tokens of past, each plane alone")
    parser.add_argument("--scored", type=int, default=64, help="tokens scored after it")
    parser.add_argument("--histories", nargs="+", type=int, default=[1024, 2048],
                        help="tokens of past, whole plans")
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0 leaves it to torch")
    parser.add_argument("-o", "--out", type=pathlib.Path, metavar="FILE",
                        help="where the plan goes")
    return parser


def say(line: str) -> None:
    print(f"recommend: {line}", file=sys.stderr, flush=True)


class _Recommender:
    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.model = LanguageModel.load(args.model, num_threads=args.threads)
        self.texts = read_texts(self.model, args.docs)
        self.dim = self.model.prefill(self.texts[0].ids[:1]).dim

    def table(self) -> CostTable:
        measured = measure_planes(
            self.model, self.texts, histories=[self.args.history], num_scored=self.args.scored,
            progress=say,
        )
        return CostTable(measured, self.args.dim or self.dim, self.args.block)

    def judge(self, plan: Plan, texts: Sequence[Text]) -> Scores:
        word = ",".join([plan.pair(), *plan.lines(), f"block={self.args.block}"])
        choice = Choice.parse(word)
        scores = score_texts(self.model, texts, [choice], histories=self.args.histories)
        return Scores.total(scores[word].values())

    def change_of(self, plan: Plan) -> Tuple[float, float]:
        value, error = self.judge(plan, self.texts).perplexity_change()
        say(f"{plan.bits:.3f} bits: perplexity {100 * value:+.2f} % ({100 * error:.2f})")
        return value, error


def main(arguments: Optional[List[str]] = None) -> int:
    args = parser().parse_args(arguments)
    try:
        work = _Recommender(args)
        table = work.table()
        if args.budget is not None:
            plan: Optional[Plan] = table.plan(args.budget)
        else:
            plan = least_bits_within(table, args.max_ppl / 100, work.change_of)
        if plan is None:
            say(f"no plan keeps the perplexity within {args.max_ppl:g} % by a standard error: more "
                "or longer --docs make the error smaller")
            return 1
        texts = read_texts(work.model, args.check_docs) if args.check_docs else work.texts
        scores = work.judge(plan, texts)
        change, kl = scores.perplexity_change(), scores.mean_kl()
        head = (
            f"{plan.bits:.3f} bits per value, blocks of {args.block} tokens, for {plan.pair()}: "
            f"perplexity {100 * change.value:+.2f} % ({100 * change.error:.2f}), "
            f"KL {kl.value:.4f} ({kl.error:.4f})"
            + (" on other texts" if args.check_docs else " on the texts it was chosen on")
        )
        text = "\n".join([f"# {head}", *plan.lines()]) + "\n"
        if args.out:
            args.out.write_text(text, encoding="utf-8")
            print(head)
            print(f"kvstow put FILE --codec {plan.pair()} --plan {args.out}")
        else:
            print(text, end="")
        return 0
    except (Error, ImportError, OSError, ValueError) as error:
        print(f"kvstow.eval.recommend: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
