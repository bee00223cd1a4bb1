"""Codecs without a service: what the store would keep of a plane, and what that gives back.

    codec = kvstow.codecs.PlaneCodec("tqm4", "k", dim=128, dtype="f32")
    planes, kept_raw = codec.encode(rows)               # rows: [tokens, heads, dim]
    codec.decode(planes, back, kept_raw)                # into an array like rows
    back = codec.read_back(rows)                        # both

Rows are NumPy arrays, torch CPU tensors, or anything else with the buffer protocol or DLPack, in
whole blocks of `tokens_per_block` tokens. NumPy is imported when it is needed. The codecs are those
of the C++ library, byte for byte; they run without the GIL.
"""

from __future__ import annotations

import pathlib
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from . import _kvstow


class CodecChoice(NamedTuple):
    """What a pair ("k=tqm4,v=tq4") or a preset ("safe") stands for."""

    k: str
    v: str
    raw_first_block: bool
    num_raw_last_tokens: int


def codec_choice(text: str) -> CodecChoice:
    """Raises InvalidArgumentError where `text` is neither."""
    return CodecChoice(*_kvstow.codec_choice(text))


def split_layers(text: str) -> Tuple[str, List[Tuple[str, int, str]]]:
    """Of "safe,layer0-1.k=int8": ("safe", [("k", 0, "int8"), ("k", 1, "int8")])."""
    return _kvstow.split_layers(text)


def all_codecs() -> Dict[str, bool]:
    """The codecs of this build; True where one needs a calibration."""
    return dict(_kvstow.codecs())


class Bundle:
    """The rotations of a model, as `kvstow calibrate` writes them: what olm*, osu2 and oscar2 need.

    Raises DataLossError for bytes that are cut short or changed.
    """

    def __init__(self, data: bytes):
        self.id, rotations = _kvstow.bundle(data)  # the name that records give it, in hexadecimal
        self._rotations = {(layer, role, head): rest for layer, role, head, *rest in rotations}

    @staticmethod
    def read(path: str) -> Bundle:
        return Bundle(pathlib.Path(path).read_bytes())

    def rotation(self, layer: int, role: str, head: int) -> Optional[Any]:
        """int16 [dim, dim] of a KV head; None where the bundle has none: its planes stay raw."""
        import numpy

        found = self._rotations.get((layer, role, head))
        return found and numpy.frombuffer(found[1], "<i2").reshape(found[0], found[0])


class PlaneCodec:
    """The codec of one role's planes.

    codec: a name; where it does not take such planes, `raw` is used, as in the store (see `name`).
    role: "k" or "v".
    rotation: int16 [dim, dim], for codecs that need a calibration.
    """

    def __init__(
        self,
        codec: str,
        role: str,
        dim: int,
        *,
        dtype: str = "bf16",
        tokens_per_block: int = 64,
        rotation: Any = None,
    ):
        options = {"dtype": dtype, "tokens_per_block": tokens_per_block, "rotation": rotation}
        self._native = _kvstow.PlaneCodec(codec, role, dim, options)
        self.tokens_per_block = tokens_per_block
        self.dim = dim

    @property
    def name(self) -> str:
        return self._native.name

    @property
    def plane_bytes(self) -> int:
        """Bytes of one encoded plane: the rows of one block, layer, role and head."""
        return self._native.plane_bytes

    @property
    def bits_per_value(self) -> float:
        return 8 * self.plane_bytes / (self.tokens_per_block * self.dim)

    def encode(self, rows: Any) -> Tuple[Any, Any]:
        """(planes, kept_raw): uint8 [blocks, heads, plane_bytes], and bool [blocks, heads], True
        where a plane is to be kept raw since its rows are not finite or too large."""
        import numpy

        num_blocks, num_heads = rows.shape[0] // self.tokens_per_block, rows.shape[1]
        planes = numpy.zeros((num_blocks, num_heads, self.plane_bytes), numpy.uint8)
        kept_raw = self._native.encode(rows, planes)
        return planes, numpy.frombuffer(kept_raw, bool).reshape(num_blocks, num_heads)

    def decode(self, planes: Any, rows: Any, kept_raw: Any = None) -> None:
        """Writes `rows`, but for the planes that are kept raw."""
        flags = bytes(planes.shape[0] * planes.shape[1]) if kept_raw is None else kept_raw.tobytes()
        self._native.decode(planes, flags, rows)

    def read_back(self, rows: Any) -> Any:
        """A copy of `rows` (NumPy or torch) as a reader of the store would get it."""
        back = rows.clone() if hasattr(rows, "clone") else rows.copy()
        planes, kept_raw = self.encode(rows)
        self.decode(planes, back, kept_raw)
        return back
