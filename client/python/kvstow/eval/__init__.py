"""kvstow.eval: what a codec costs a language model that reads its quantized past back.

    python -m kvstow.eval MODEL --docs a.txt b.txt --codecs safe k=tqm3,v=tq2 --html report.html
    python -m kvstow.eval MODEL --docs a.txt b.txt --gate safe small tiny lossless

Any causal language model of transformers whose layers all keep K and V of every token. The method:
a text is prefilled exactly; at a history of 1,024 and of 2,048 tokens every past row, but for the
first and the last few, is replaced by decode(encode(row)) of kvstow's own codecs; the next 160
tokens are scored against that cache, and again against the exact one. Everything is paired, so few
texts tell much.

torch and transformers are imported when they are needed: pip install 'kvstow[eval]'.
"""

from .choices import Choice
from .gates import BANDS, broken_bands
from .language_model import LanguageModel
from .likelihood import Scores, score_texts
from .past import Past, read_back

__all__ = [
    "BANDS",
    "Choice",
    "LanguageModel",
    "Past",
    "Scores",
    "broken_bands",
    "read_back",
    "score_texts",
]
