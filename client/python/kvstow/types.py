"""Values: what a model's KV looks like, what names a block, and what the calls answer."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple, Union

from . import _kvstow
from .errors import Error, InvalidArgumentError, from_status

KEY_BYTES = 32

# Bits of a location.
DRAM = 1
NVME = 2
HBM = 8

Key = Union[bytes, str]


@dataclasses.dataclass(frozen=True)
class LayerGroup:
    """Consecutive layers of equal shape.

    kind: "full", "sliding" (K and V per token), "mla" (one latent row per token: one head, v_dim
    0), "opaque" (k_dim bytes per token and head, v_dim 0).
    k_dim, v_dim: values per row (bytes for opaque and nvfp4).
    """

    first_layer: int
    num_layers: int
    kind: str
    num_kv_heads: int
    k_dim: int
    v_dim: int


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """Everything about a model that decides what its KV bytes mean. All of it goes into the keys.

    weights: digest or revision of the weights.
    kv_dtype: "bf16", "f16", "f32", "f8_e4m3", "f8_e5m2", "int8", "nvfp4", "opaque".
    groups: cover layers 0..n-1, ascending, each layer once.
    rope: canonical text of the RoPE parameters, "base=100000,half".
    tokens_per_block: 32 to 1024, a multiple of 32.
    tokenizer: digest of the tokenizer.
    """

    name: str
    weights: str
    groups: Sequence[LayerGroup]
    kv_dtype: str = "bf16"
    rope: str = ""
    keys_are_rotated: bool = True
    tokens_per_block: int = 64
    tokenizer: str = ""

    @staticmethod
    def uniform(
        name: str,
        weights: str,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        **others: Any,
    ) -> "ModelSpec":
        """A model whose layers are all alike."""
        group = LayerGroup(0, num_layers, "full", num_kv_heads, head_dim, head_dim)
        return ModelSpec(name, weights, (group,), **others)

    def fingerprint(self) -> bytes:
        """32 bytes. Raises InvalidArgumentError where the spec is not valid, naming the field."""
        return _kvstow.Model(self).fingerprint


class Model:
    """A model that the service knows. Made by Client.register_model, or of a spec alone where only
    keys are wanted."""

    def __init__(self, spec_or_native: Any):
        native = spec_or_native
        if not isinstance(native, _kvstow.Model):
            native = _kvstow.Model(spec_or_native)
        self._native = native
        fields = native.spec()
        fields["groups"] = tuple(LayerGroup(**group) for group in fields["groups"])
        self.spec = ModelSpec(**fields)
        self.fingerprint: bytes = native.fingerprint
        self.num_layers: int = native.num_layers
        self.tokens_per_block = self.spec.tokens_per_block
        # Bytes of one block unencoded: all layers, both roles, all heads.
        self.block_bytes: int = native.block_bytes
        # (kv heads, k_dim, v_dim) per layer.
        self.layer_shapes: List[Tuple[int, int, int]] = native.layer_shapes()

    def __repr__(self) -> str:
        return f"Model({self.spec.name!r}, fingerprint={self.fingerprint.hex()[:16]}...)"


@dataclasses.dataclass(frozen=True)
class KeyContext:
    """Whose KV it is, besides the tokens.

    tenant: salt of the tenant, at most 1024 bytes.
    lora_digest: digest of the adapter's weights (not its name), at most 64 bytes.
    multimodal_digests: in prompt order, at most 64 bytes each.
    """

    tenant: str = ""
    lora_digest: bytes = b""
    multimodal_digests: Sequence[bytes] = ()

    def __post_init__(self) -> None:
        for digest in (self.lora_digest, *self.multimodal_digests):
            if not isinstance(digest, bytes):
                raise InvalidArgumentError(
                    f"digests: {type(digest).__name__}, want bytes of the digest itself"
                )


def pack_keys(keys: Union[Key, Iterable[Key]]) -> bytes:
    """Keys one after the other; each is 32 bytes, or 64 hexadecimal digits."""
    if isinstance(keys, (bytes, str)):
        keys = (keys,)
    packed = []
    for i, key in enumerate(keys):
        try:
            raw = bytes.fromhex(key) if isinstance(key, str) else bytes(memoryview(key))
        except (ValueError, TypeError):
            raw = b""
        if len(raw) != KEY_BYTES:
            raise InvalidArgumentError(
                f"keys[{i}]: {key!r}, want 32 bytes or 64 hexadecimal digits"
            )
        packed.append(raw)
    return b"".join(packed)


def unpack_keys(packed: bytes) -> List[bytes]:
    return [packed[i : i + KEY_BYTES] for i in range(0, len(packed), KEY_BYTES)]


def block_keys(
    model: Union[Model, ModelSpec],
    tokens: Any,
    *,
    tenant: str = "",
    lora_digest: bytes = b"",
    multimodal_digests: Sequence[bytes] = (),
) -> List[bytes]:
    """The 256-bit keys of the full blocks of `tokens`, first block first, as `kvstow key` prints
    them (`key.hex()`). Needs no service.

    tokens: int [tokens], an array or a sequence.
    """
    if not isinstance(model, Model):
        model = Model(model)
    context = KeyContext(tenant, lora_digest, multimodal_digests)
    return unpack_keys(_kvstow.block_keys(model._native, tokens, context))


def _error_of(status: Optional[Tuple[str, str]]) -> Optional[Error]:
    return None if status is None else from_status(*status)


@dataclasses.dataclass(frozen=True)
class PutResult:
    """keys: of all full blocks of the prompt. num_stored: sealed by this call. num_existing: there
    before, nothing was sent. num_refused: at a limit; `first_refusal` says which.
    num_leftover_tokens: after the last full block, not stored. sent_bytes: payload on the wire."""

    keys: List[bytes]
    num_stored: int
    num_existing: int
    num_refused: int
    first_refusal: Optional[Error]
    num_leftover_tokens: int
    sent_bytes: int

    @classmethod
    def _from(cls, raw: Dict[str, Any]) -> "PutResult":
        raw["keys"] = unpack_keys(raw["keys"])
        raw["first_refusal"] = _error_of(raw["first_refusal"])
        return cls(**raw)


@dataclasses.dataclass(frozen=True)
class LookupResult:
    """locations: per key, HBM, DRAM and NVME added, 0 for a miss. num_leading: blocks before the first
    miss."""

    keys: List[bytes]
    locations: bytes
    num_leading: int

    @property
    def leading_keys(self) -> List[bytes]:
        return self.keys[: self.num_leading]


@dataclasses.dataclass(frozen=True)
class GetResult:
    """num_leading: blocks of the prefix that are now in the caller's memory. blocks: per key, None
    where it came, else why not (NotFoundError, DataLossError, ...). received_bytes: payload on the
    wire."""

    num_leading: int
    blocks: List[Optional[Error]]
    received_bytes: int


@dataclasses.dataclass(frozen=True)
class TierStat:
    capacity_bytes: int
    used_bytes: int
    sealed_bytes: int
    reserved_bytes: int
    num_blocks: int


@dataclasses.dataclass(frozen=True)
class Stat:
    """What a service holds. tiers: by name, "dram", "nvme". codecs: by name, with num_blocks,
    record_bytes, logical_bytes. counters: as in the metrics, without prefix."""

    tiers: Dict[str, TierStat]
    codecs: Dict[str, Dict[str, int]]
    counters: Dict[str, int]
    num_blocks: int
    index_bytes: int
    open_tickets: int
    open_leases: int
    pinned_bytes: int
    version: str
    uptime_s: float
    resident_bytes: int


@dataclasses.dataclass(frozen=True)
class BlockInfo:
    """record_bytes: as stored. logical_bytes: of the rows."""

    key: bytes
    fingerprint: bytes
    codec: str
    locations: int
    num_tokens: int
    record_bytes: int
    logical_bytes: int
    is_pinned: bool


@dataclasses.dataclass(frozen=True)
class VerifyResult:
    """bad_keys: dropped by the service."""

    num_checked: int
    bad_keys: List[bytes]
