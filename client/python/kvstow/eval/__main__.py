"""python -m kvstow.eval MODEL --docs FILES [--codecs CHOICES] [--gate PRESETS]"""

from __future__ import annotations

import argparse
import hashlib
import json
import pathlib
import sys
from typing import Any, Dict, List, Optional

from ..errors import Error
from . import report as reports
from .choices import Choice
from .gates import BANDS, broken_bands
from .language_model import LanguageModel
from .likelihood import Scores, read_texts, score_texts
from .retrieval import agreement, count_found

DESCRIPTION = """Judges codecs on a causal language model of transformers that reads its quantized
past back: perplexity and next-token KL against the exact past, and, when asked for, needles and
free generation. Exit status: 0 done, 1 a gate is broken, 2 the command line is wrong."""

EPILOG = """A choice of codecs is a preset (safe), a codec (tq4), or k=tqm4,v=tq3 with overrides for
layers (layer0.k=tqm4, layer12-14.v=tq3, plan=FILE), for the raw tokens at both ends (first=64,
last=64) and for the tokens per block (block=64)."""


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("kvstow.eval", description=DESCRIPTION, epilog=EPILOG)

    def add(name: str, metavar: str, help: str, **options: Any) -> None:
        parser.add_argument(name, metavar=metavar, help=help, **options)

    bands = ", ".join(BANDS)
    add("model", "MODEL", "a model of the hub, a folder, or a GGUF file")
    add("--docs", "FILE", "texts, UTF-8", nargs="+", required=True)
    add("--codecs", "CHOICE", "what to judge", nargs="+", default=[])
    add("--gate", "PRESET", f"exit status 1 when one of these leaves its band: {bands}",
        nargs="+", default=[], choices=sorted(BANDS))
    add("--histories", "TOKENS", "lengths of the past", nargs="+", type=int, default=[1024, 2048])
    add("--scored", "TOKENS", "scored after each history", type=int, default=160)
    add("--first", "TOKENS", "raw at the beginning, but in presets", type=int, default=64)
    add("--last", "TOKENS", "raw at the end, but in presets", type=int, default=64)
    add("--block", "TOKENS", "tokens per block", type=int, default=64)
    add("--needles", "TEXTS", "hide nine needles in so many texts", type=int, default=0)
    add("--write", "TOKENS", "length of free generation", type=int, default=0)
    add("--write-texts", "TEXTS", "texts that it continues", type=int, default=2)
    add("--dtype", "DTYPE", "of the model and its past", default="float32",
        choices=["float32", "bfloat16", "float16"])
    add("--threads", "N", "of torch; 0 leaves it to torch", type=int, default=0)
    add("--json", "FILE", "results; - for standard output")
    add("--html", "FILE", "results as a page")
    return parser


def say(line: str) -> None:
    print(f"eval: {line}", file=sys.stderr, flush=True)


def choices_of(args: argparse.Namespace) -> List[Choice]:
    words = list(dict.fromkeys(args.codecs + args.gate)) or list(BANDS)
    ends = {"first": args.first, "last": args.last, "tokens_per_block": args.block}
    return [Choice.parse(word, **ends) for word in words]


def run(args: argparse.Namespace, model: LanguageModel, choices: List[Choice]) -> Dict[str, Any]:
    texts = read_texts(model, args.docs)
    scores = score_texts(
        model, texts, choices, histories=args.histories, num_scored=args.scored, progress=say
    )
    config = model.network.config
    shape = model.prefill(texts[0].ids[:1])
    rows = [
        reports.row_of(choice, scores[choice.text], shape, max(args.histories))
        for choice in choices
    ]
    result: Dict[str, Any] = {
        "model": getattr(config, "_name_or_path", "") or args.model,
        "dtype": args.dtype,
        "histories": args.histories,
        "texts": {
            text.name: {
                "tokens": len(text.ids),
                "sha256": hashlib.sha256(pathlib.Path(file).read_bytes()).hexdigest(),
            }
            for text, file in zip(texts, args.docs)
        },
        "rows": rows,
    }
    if args.needles:
        hidden = count_found(model, texts[: args.needles], choices, progress=say)
        result["needles_found_exact"] = hidden[1]
        for row in rows:
            row.update(needles_found=hidden[2][row["codecs"]], needles=hidden[0])
    if args.write:
        lengths = agreement(
            model,
            texts[: args.write_texts],
            choices,
            history=min(args.histories),
            num_tokens=args.write,
            progress=say,
        )
        for row in rows:
            row.update(agreement=lengths[row["codecs"]], written=args.write)
    result["broken"] = check_gates(args.gate, scores)
    return result


def check_gates(presets: List[str], scores: Dict[str, Dict[str, Scores]]) -> List[str]:
    broken = []
    for preset in presets:
        broken += broken_bands(preset, Scores.total(scores[preset].values()))
    return broken


def write(path: str, text: str) -> None:
    if path == "-":
        sys.stdout.write(text)
    else:
        pathlib.Path(path).write_text(text, encoding="utf-8")


def main(arguments: Optional[List[str]] = None) -> int:
    args = parser().parse_args(arguments)
    try:
        choices = choices_of(args)
        model = LanguageModel.load(args.model, args.dtype, args.threads)
        result = run(args, model, choices)
    except (Error, ImportError, OSError, ValueError) as error:
        print(f"kvstow.eval: {error}", file=sys.stderr)
        return 2
    if args.json != "-":
        print(reports.text_table(result["rows"]))
        print(reports.describe(result))
    if args.json:
        write(args.json, json.dumps(result, indent=1) + "\n")
    if args.html:
        write(args.html, reports.page(result))
    for line in result["broken"]:
        print(f"kvstow.eval: gate broken: {line}", file=sys.stderr)
    return 1 if result["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
