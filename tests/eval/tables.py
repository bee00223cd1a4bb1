"""Writes the tables that README.md and kernels/codec/README.md hold between markers, and compares a
run with what was measured before the codecs were written. Exit status 1 when they disagree.

tables.py REPORT.json
"""

import json
import math
import pathlib
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


def disagreements(rows):
    """Lines for what is further from the measured value than two standard errors of the difference.
    The texts differ, so KL is compared by its logarithm, and its error taken to be the same there
    as here: as many tokens were scored."""
    lines = []
    for row in rows:
        known = MEASURED.get(row["codecs"])
        if known is None:
            continue
        change, error = row["perplexity_change"], row["perplexity_change_error"]
        allowed = 2 * math.hypot(error, known["error"] / 100)
        far = abs(change - known["perplexity_change"] / 100)
        kl_far = abs(math.log(row["kl"] / known["kl"]))
        kl_allowed = 2 * math.sqrt(2) * row["kl_error"] / row["kl"]
        print(
            f"{row['codecs']:16} perplexity {100 * change:+.2f} % ({100 * error:.2f}), measured "
            f"{known['perplexity_change']:+.2f} % ({known['error']:.2f}): {far / allowed * 2:.1f} "
            f"standard errors; KL {row['kl']:.5f}, measured {known['kl']:.5f}: "
            f"{kl_far / kl_allowed * 2:.1f}"
        )
        if far > allowed:
            lines.append(f"{row['codecs']}: perplexity is further than two standard errors")
        if kl_far > kl_allowed:
            lines.append(f"{row['codecs']}: KL is further than two standard errors")
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
