"""Past: the exact K and V of a text, and what is left of them after a codec."""

from __future__ import annotations

import functools
from typing import Any, List, Tuple

from ..codecs import PlaneCodec, all_codecs
from ..errors import InvalidArgumentError
from .choices import Choice

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
    size = choice.tokens_per_block
    layers = []
    for layer, pair in enumerate(past.layers):
        back = []
        for role, rows in zip(("k", "v"), pair):
            codec = _plane_codec(choice.codec(role, layer), role, rows, size)
            rows = rows.clone()
            if end > begin:
                # [tokens, heads, dim], a view: the codecs read and write any strides.
                view = rows[0, :, begin:end].transpose(0, 1)
                planes, kept_raw = codec.encode(view)
                codec.decode(planes, view, kept_raw)
            back.append(rows)
        layers.append((back[0], back[1]))
    return Past(layers)


def _plane_codec(codec: str, role: str, rows: Any, tokens_per_block: int) -> PlaneCodec:
    dtype = _DTYPES.get(str(rows.dtype))
    if dtype is None:
        raise InvalidArgumentError(f"rows of {rows.dtype}, want float32, bfloat16 or float16")
    if all_codecs().get(codec):
        raise InvalidArgumentError(f"codec {codec!r} needs a calibration, which eval has not")
    return _cached_codec(codec, role, rows.shape[-1], dtype, tokens_per_block)


@functools.lru_cache(maxsize=None)
def _cached_codec(codec: str, role: str, dim: int, dtype: str, tokens_per_block: int) -> PlaneCodec:
    return PlaneCodec(codec, role, dim, dtype=dtype, tokens_per_block=tokens_per_block)
