"""Choice: which codec each plane of a past takes, as one word of --codecs says it.

safe                                 a preset, with the blocks that it keeps raw
tq4                                  one codec for keys and values
k=tqm3,v=tq2                         one for each
k=tqm3,v=tq2,layer12-14.v=tq3        and others for some layers; here over raw, too
k=tqm3,v=tq2,plan=FILE               a plan of layers, as `kvstow put --plan` takes it
k=tqm3,v=tq2,first=64,last=128       tokens at both ends that stay raw
k=tqm3,v=tq2,block=256               tokens per block
olm4,calibration=FILE                a bundle, for the codecs that need one
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from typing import Any, Dict, Iterator, List, Tuple

from ..codecs import PlaneCodec, all_codecs, codec_choice, split_layers
from ..errors import InvalidArgumentError

ROLES = ("k", "v")


@dataclasses.dataclass(frozen=True)
class Choice:
    text: str
    k: str
    v: str
    layers: Tuple[Tuple[str, int, str], ...] = ()  # (role, layer, codec)
    num_raw_first_tokens: int = 64
    num_raw_last_tokens: int = 64
    tokens_per_block: int = 64
    calibration: str = ""  # a file

    @staticmethod
    def parse(text: str, *, first: int = 64, last: int = 64, tokens_per_block: int = 64) -> Choice:
        """`first`, `last`: the raw tokens of words that are no preset and do not say themselves."""
        values = {"first": first, "last": last, "block": tokens_per_block}
        pair: Dict[str, str] = {}
        calibration = ""
        without_layers, layers = split_layers(text)
        for i, item in enumerate(without_layers.split(",")):
            name, equals, value = item.partition("=")
            if i == 0 and not equals:
                preset = codec_choice(item)
                pair = {"k": preset.k, "v": preset.v}
                if item not in all_codecs():
                    values["first"] = tokens_per_block if preset.raw_first_block else 0
                    values["last"] = preset.num_raw_last_tokens
            elif name in ROLES and equals:
                pair[name] = value
            elif name == "plan" and equals:
                layers = _layers_of_file(value) + layers
            elif name == "calibration" and value:
                calibration = value
            elif name in values and value.isdigit():
                values[name] = int(value)
            else:
                raise InvalidArgumentError(
                    f"codecs {text!r}: {item!r} is not understood, want a preset, a codec, "
                    "k=CODEC, v=CODEC, layerN.k=CODEC, layerN-M.v=CODEC, plan=FILE, "
                    "first=TOKENS, last=TOKENS, block=TOKENS or calibration=FILE"
                )
        if set(pair) != set(ROLES):
            raise InvalidArgumentError(f"codecs {text!r}: no codec for both k and v")
        codec_choice(f"k={pair['k']},v={pair['v']}")  # raises with the known names
        return Choice(
            text,
            pair["k"],
            pair["v"],
            tuple(layers),
            values["first"],
            values["last"],
            values["block"],
            calibration,
        )

    def codec(self, role: str, layer: int) -> str:
        found = self.k if role == "k" else self.v
        for other_role, other_layer, codec in self.layers:
            if (role, layer) == (other_role, other_layer):
                found = codec
        return found

    def encoded_tokens(self, num_tokens: int) -> Tuple[int, int]:
        """[begin, end) of what is encoded: whole blocks between the raw ends. With ends of whole
        blocks, as presets have them, these are the blocks that the store encodes."""
        begin = min(self.num_raw_first_tokens, num_tokens)
        count = max(num_tokens - begin - self.num_raw_last_tokens, 0) // self.tokens_per_block
        return begin, begin + count * self.tokens_per_block

    def bits_per_value(self, num_layers: int, dim: int) -> float:
        """Of what is encoded, as stored: scales, means and the zeros that fill up a plane."""
        total = sum(
            _bits(self.codec(role, layer), role, dim, self.tokens_per_block)
            for role, layer in planes(num_layers)
        )
        return total / (2 * num_layers)

    def bits_of_all(self, num_layers: int, dim: int, num_tokens: int) -> float:
        """Of a whole past of `num_tokens`: raw rows count 16 bits a value."""
        begin, end = self.encoded_tokens(num_tokens)
        share = (end - begin) / num_tokens
        return share * self.bits_per_value(num_layers, dim) + (1 - share) * 16


def _layers_of_file(path: str) -> List[Tuple[str, int, str]]:
    lines = pathlib.Path(path).read_text(encoding="utf-8").splitlines()
    items = [line.partition("#")[0].strip().strip(",") for line in lines]
    rest, layers = split_layers(",".join(item for item in items if item))
    if rest:
        raise InvalidArgumentError(f"{path}: {rest!r} is no layer of a plan")
    return layers


def planes(num_layers: int) -> Iterator[Tuple[str, int]]:
    for layer in range(num_layers):
        for role in ROLES:
            yield role, layer


@functools.lru_cache(maxsize=None)
def _bits(codec: str, role: str, dim: int, tokens_per_block: int) -> float:
    # Of any rotation: its values are in the bundle, not in the planes.
    rotation = identity(dim) if all_codecs()[codec] else None
    made = PlaneCodec(codec, role, dim, tokens_per_block=tokens_per_block, rotation=rotation)
    return made.bits_per_value


def identity(dim: int) -> Any:
    """The rotation that turns nothing, int16 [dim, dim]."""
    import numpy

    return numpy.eye(dim, dtype=numpy.int16) << 14
