"""Past: the exact K and V of a text, and what is left of them after a codec."""

from __future__ import annotations

import functools
from typing import Any, Iterator, List, Optional, Tuple

from ..codecs import Bundle, PlaneCodec, all_codecs
from ..errors import InvalidArgumentError
from .choices import ROLES, Choice

_DTYPES = {"torch.float32": "f32", "torch.bfloat16": "bf16", "torch.float16": "f16"}


class Past:
    """Per layer (keys, values), each [1, KV heads, tokens, dim], on the host."""

    def __init__(self, layers: List[Tuple[Any, Any]]):
        self.layers = layers

    @property
    def num_tokens(self) -> int:
        return self.layers[0][0].shape[-2]

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def dim(self) -> int:
        return self.layers[0][0].shape[-1]

    def first(self, num_tokens: int) -> Past:
        return Past([(k[:, :, :num_tokens], v[:, :, :num_tokens]) for k, v in self.layers])

    def cache(self) -> Any:
        """A DynamicCache with copies, which a model may grow."""
        from transformers import DynamicCache

        cache = DynamicCache()
        for i, (k, v) in enumerate(self.layers):
            cache.update(k.clone(), v.clone(), i)
        return cache


def read_back(past: Past, choice: Choice) -> Past:
    """The past as a worker would get it from a store that was told `choice`: whole blocks, encoded
    and decoded by the codecs of the C++ library."""
    begin, end = choice.encoded_tokens(past.num_tokens)
    layers = []
    for layer, pair in enumerate(past.layers):
        back = []
        for role, rows in zip(ROLES, pair):
            rows = rows.clone()
            if end > begin:
                # [tokens, heads, dim], a view: the codecs read and write any strides.
                view = rows[0, :, begin:end].transpose(0, 1)
                for codec, part in _codecs_of(choice, layer, role, view):
                    planes, kept_raw = codec.encode(part)
                    codec.decode(planes, part, kept_raw)
            back.append(rows)
        layers.append((back[0], back[1]))
    return Past(layers)


def _codecs_of(
    choice: Choice, layer: int, role: str, rows: Any
) -> Iterator[Tuple[PlaneCodec, Any]]:
    """Each codec with its heads of `rows`: all of them, or one where it is calibrated."""
    dtype = _DTYPES.get(str(rows.dtype))
    if dtype is None:
        raise InvalidArgumentError(f"rows of {rows.dtype}, want float32, bfloat16 or float16")
    codec = choice.codec(role, layer)
    options = (role, rows.shape[-1], dtype, choice.tokens_per_block)
    if not all_codecs().get(codec):
        yield _cached_codec(codec, *options), rows
        return
    if not choice.calibration:
        raise InvalidArgumentError(f"codec {codec!r} needs a bundle, want calibration=FILE")
    for head in range(rows.shape[1]):
        place = (choice.calibration, layer, head)
        yield _cached_codec(codec, *options, place), rows[:, head : head + 1]


@functools.lru_cache(maxsize=None)
def _cached_codec(
    codec: str,
    role: str,
    dim: int,
    dtype: str,
    tokens_per_block: int,
    place: Optional[Tuple[str, int, int]] = None,
) -> PlaneCodec:
    rotation = None
    if place is not None:
        bundle, layer, head = place
        rotation = _cached_bundle(bundle).rotation(layer, role, head)
        if rotation is None:
            raise InvalidArgumentError(f"{bundle}: nothing for {role} of layer {layer}, head {head}")
    return PlaneCodec(
        codec, role, dim, dtype=dtype, tokens_per_block=tokens_per_block, rotation=rotation
    )


@functools.lru_cache(maxsize=4)
def _cached_bundle(path: str) -> Bundle:
    return Bundle.read(path)
