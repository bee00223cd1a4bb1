"""Writes the tables that README.md and kernels/codec/README.md hold between markers, and compares a
run with what was measured before the codecs were written. Exit status 1 when they disagree.

tables.py REPORT.json
"""

import json
import math
import pathlib
import statistics
import sys

from kvstow.eval import report as reports

ROOT = pathlib.Path(__file__).resolve().parents[2]
FILES = ("README.md", "kernels/codec/README.md")
BEGIN, END = "<!-- eval: begin -->", "<!-- eval: end -->"
MEASURED = json.loads((ROOT / "tests" / "eval" / "measured.json").read_text())


def write_table(path: pathlib.Path, text: str) -> None:
    before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{path}: the markers {BEGIN} and {END} are missing")
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def over_texts(row, figure):
    """Standard error of a figure's mean over texts: how far another set of texts may be."""
    values = [figure(part) for part in row["texts"].values()]
    return statistics.stdev(values) / math.sqrt(len(values))


def disagreements(rows):
    """Lines for what is further from the measured value than two standard errors of the difference.
    The texts differ, so the error is the larger of that over tokens and that over texts; of KL by
    its logarithm. Nothing is known of the measured KL's own error: it is taken to be as large."""
    lines = []
    for row in rows:
        known = MEASURED.get(row["codecs"])
        if known is None:
            continue
        kl_error = max(
            row["kl_error"] / row["kl"], over_texts(row, lambda part: math.log(part["kl"]))
        )
        far = {"KL": abs(math.log(row["kl"] / known["kl"])) / (math.sqrt(2) * kl_error)}
        print(f"{row['codecs']}: KL {row['kl']:.5f}, measured {known['kl']:.5f}", end="")
        if "perplexity_change" in known:
            change = 100 * row["perplexity_change"]
            error = 100 * max(
                row["perplexity_change_error"],
                over_texts(row, lambda part: part["perplexity_change"]),
            )
            distance = abs(change - known["perplexity_change"])
            far["perplexity"] = distance / math.hypot(error, known["error"])
            print(
                f"; perplexity {change:+.2f} % ({error:.2f}), measured "
                f"{known['perplexity_change']:+.2f} % ({known['error']:.2f})",
                end="",
            )
        print("; standard errors apart:", ", ".join(f"{name} {x:.1f}" for name, x in far.items()))
        lines += [
            f"{row['codecs']}: {name} is {x:.1f} standard errors away"
            for name, x in far.items()
            if x > 2
        ]
    return lines


def main(path: str) -> int:
    report = json.loads(pathlib.Path(path).read_text())
    table = reports.markdown_table(report["rows"]) + "\n\n" + reports.describe(report)
    for name in FILES:
        write_table(ROOT / name, table)
    lines = disagreements(report["rows"])
    for line in lines:
        print(f"tables: {line}", file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
