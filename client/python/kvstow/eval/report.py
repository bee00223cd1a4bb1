"""Report: the results of a run as JSON, as text, as Markdown and as a page."""

from __future__ import annotations

import html
import math
from typing import Any, Dict, List, Sequence, Tuple

from .choices import Choice
from .likelihood import Scores
from .past import Past

# The head dim of most models: bits are given for it, too.
COMMON_DIM = 128

Row = Dict[str, Any]


def row_of(choice: Choice, scores: Dict[str, Scores], past: Past, history: int) -> Row:
    """One choice over all texts, and each text by itself. `past` tells layers and head dim."""
    total = Scores.total(scores.values())
    return {
        "codecs": choice.text,
        "bits": choice.bits_per_value(past.num_layers, past.dim),
        f"bits_{COMMON_DIM}": choice.bits_per_value(past.num_layers, COMMON_DIM),
        f"bits_of_all_{COMMON_DIM}": choice.bits_of_all(past.num_layers, COMMON_DIM, history),
        **figures(total),
        "texts": {name: figures(part) for name, part in scores.items()},
    }


def figures(scores: Scores) -> Row:
    kl, change = scores.mean_kl(), scores.perplexity_change()
    return {
        "scored_tokens": scores.num_tokens,
        "exact_perplexity": scores.perplexity(),
        "perplexity_change": change.value,
        "perplexity_change_error": change.error,
        "kl": kl.value,
        "kl_error": kl.error,
        "same_first": scores.same_first(),
    }


def cells(rows: Sequence[Row]) -> Tuple[List[str], List[List[str]]]:
    """Head and body of the table. Columns that no row has are left out."""
    head = ["keys / values", "bits", f"dim {COMMON_DIM}", "with raw ends"]
    head += ["perplexity", "next-token KL", "same first word"]
    has_needles = any("needles_found" in row for row in rows)
    has_writing = any("agreement" in row for row in rows)
    if has_needles:
        head.append(f"needles of {rows[0]['needles']}")
    if has_writing:
        head.append(f"written alike, of {rows[0]['written']}")
    body = []
    for row in rows:
        line = [
            row["codecs"],
            f"{row['bits']:.2f}",
            f"{row[f'bits_{COMMON_DIM}']:.2f}",
            f"{row[f'bits_of_all_{COMMON_DIM}']:.2f}",
            _percent(row["perplexity_change"], row["perplexity_change_error"]),
            _small(row["kl"]) + (f" ({_small(row['kl_error'])})" if row["kl"] else ""),
            f"{100 * row['same_first']:.1f} %",
        ]
        if has_needles:
            line.append(str(row["needles_found"]))
        if has_writing:
            line.append(", ".join(str(length) for length in row["agreement"]))
        body.append(line)
    return head, body


def _percent(value: float, error: float) -> str:
    return f"{100 * value:+.2f} % ({100 * error:.2f})" if value or error else "0"


def _small(value: float) -> str:
    return f"{value:.2g}" if value < 1e-3 else f"{value:.4f}".lstrip("0")


def text_table(rows: Sequence[Row]) -> str:
    head, body = cells(rows)
    widths = [max(len(line[i]) for line in [head] + body) for i in range(len(head))]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths))
        ).rstrip()
        for line in [[cell.upper() for cell in head]] + body
    ]
    return "\n".join(lines)


def markdown_table(rows: Sequence[Row]) -> str:
    head, body = cells(rows)
    lines = [head, ["---"] * len(head)] + [[f"`{line[0]}`"] + line[1:] for line in body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


_STYLE = """
:root{color-scheme:light dark;--line:#8884}
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
svg{width:100%;height:auto;font:12px system-ui,sans-serif;fill:currentColor}
svg .axis{stroke:var(--line)}svg .dot{fill:#0072b2}.broken{color:#d55e00}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
td,th{padding:.2rem .7rem;text-align:right;border-bottom:1px solid var(--line)}
td:first-child,th:first-child{text-align:left}div{overflow-x:auto}
"""


def page(report: Dict[str, Any]) -> str:
    """One file: styles, a plot of KL over bits as SVG, the tables. Loads nothing, runs nothing."""
    rows = report["rows"]
    head, body = cells(rows)
    sections = [
        f"<h1>kvstow eval: {html.escape(report['model'])}</h1>",
        f"<p>{html.escape(describe(report))}</p>",
        plot(rows),
        _html_table(head, body),
        "<h2>By text</h2>",
    ]
    for name in rows[0]["texts"]:
        parts = [{**row, **row["texts"][name]} for row in rows]
        for part in parts:
            part.pop("needles_found", None)
            part.pop("agreement", None)
        sections += [f"<h3>{html.escape(name)}</h3>", _html_table(*cells(parts))]
    for line in report.get("broken", []):
        sections.append(f'<p class="broken">{html.escape(line)}</p>')
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>kvstow eval</title>'
        f"<style>{_STYLE}</style></head><body>" + "\n".join(sections) + "</body></html>\n"
    )


def describe(report: Dict[str, Any]) -> str:
    rows = report["rows"]
    return (
        f"{len(report['texts'])} texts, {rows[0]['scored_tokens']} scored tokens at histories of "
        f"{', '.join(str(history) for history in report['histories'])}; perplexity with the exact "
        f"past {rows[0]['exact_perplexity']:.2f}. Standard errors in parentheses, of paired "
        f"differences. Bits per value: of what is encoded, the same at head dim {COMMON_DIM}, and "
        f"of a past of {max(report['histories'])} tokens at that dim with its raw ends as bf16."
    )


def _html_table(head: List[str], body: List[List[str]]) -> str:
    def line(tag: str, items: List[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(item)}</{tag}>" for item in items) + "</tr>"

    lines = line("th", head) + "".join(line("td", items) for items in body)
    return f"<div><table>{lines}</table></div>"


_WIDTH, _HEIGHT, _MARGIN = 760, 380, 46
_Point = Tuple[float, float]


def plot(rows: Sequence[Row]) -> str:
    """KL (logarithmic) over bits per value. Rows without loss have no place on it."""
    dots = [(row["bits"], row["kl"], row["codecs"]) for row in rows if row["kl"] > 0]
    if not dots:
        return ""
    low, high = (edge(math.log10(kl) for _, kl, _ in dots) for edge in (min, max))
    low, high = math.floor(low), max(math.ceil(high), math.floor(low) + 1)
    most = math.ceil(max(bits for bits, _, _ in dots)) + 1

    def x(bits: float) -> float:
        return _MARGIN + (_WIDTH - 2 * _MARGIN) * bits / most

    def y(log_kl: float) -> float:
        return _HEIGHT - _MARGIN - (_HEIGHT - 2 * _MARGIN) * (log_kl - low) / (high - low)

    marks = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="KL over bits">']
    for power in range(low, high + 1):
        at = y(power)
        marks.append(_line((x(0), at), (x(most), at), (x(0) - 34, at + 4), f"1e{power}"))
    for bits in range(0, most + 1):
        at = x(bits)
        marks.append(_line((at, y(low)), (at, y(low) + 4), (at - 3, y(low) + 18), str(bits)))
    for bits, kl, name in dots:
        at_x, at_y = x(bits), y(math.log10(kl))
        label = html.escape(name if len(name) <= 24 else name[:22] + "..")
        marks.append(f'<circle class="dot" cx="{at_x:.1f}" cy="{at_y:.1f}" r="4"/>')
        marks.append(f'<text x="{at_x + 7:.1f}" y="{at_y - 5:.1f}">{label}</text>')
    marks.append(f'<text x="{_WIDTH / 2 - 40}" y="{_HEIGHT - 6}">bits per value</text></svg>')
    return "".join(marks)


def _line(begin: _Point, end: _Point, at: _Point, label: str) -> str:
    return (
        f'<line class="axis" x1="{begin[0]:.1f}" y1="{begin[1]:.1f}" x2="{end[0]:.1f}" '
        f'y2="{end[1]:.1f}"/><text x="{at[0]:.1f}" y="{at[1]:.1f}">{label}</text>'
    )
