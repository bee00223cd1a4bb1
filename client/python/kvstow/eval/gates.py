"""The bands of the presets: what each may cost a model, and the check of it."""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional

from .likelihood import Scores


class Band(NamedTuple):
    kl: float
    perplexity_change: Optional[float]  # None: not bounded


BANDS: Dict[str, Band] = {
    "lossless": Band(0, 0),
    "safe": Band(0.003, 0.007),
    "small": Band(0.004, None),
    "tiny": Band(0.02, 0.025),
}


def broken_bands(preset: str, scores: Scores) -> List[str]:
    """One line for each figure out of its band; a figure that is not a number is."""
    band = BANDS[preset]
    kl, change = scores.mean_kl(), scores.perplexity_change()
    broken = []
    if not kl.value <= band.kl or (band.kl == 0 and any(scores.kl)):
        broken.append(f"{preset}: KL {kl.value:.3g} (+- {kl.error:.1g}), allowed {band.kl:g}")
    if band.perplexity_change is not None:
        # Where nothing may change, a gain is a change too.
        found = abs(change.value) if band.perplexity_change == 0 else change.value
        if not found <= band.perplexity_change:
            broken.append(
                f"{preset}: perplexity {100 * change.value:+.3g} % (+- {100 * change.error:.1g}), "
                f"allowed {100 * band.perplexity_change:+g} %"
            )
    return broken
