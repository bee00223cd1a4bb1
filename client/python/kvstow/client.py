"""Client: puts KV into a kvstow service and gets it back."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any, Iterator, List, Optional, Sequence, Tuple, Union

from . import _kvstow
from .errors import Error, FailedPreconditionError
from .types import (
    BlockInfo,
    GetResult,
    Key,
    KeyContext,
    LookupResult,
    Model,
    ModelSpec,
    PutResult,
    Stat,
    TierStat,
    VerifyResult,
    _error_of,
    block_keys,
    pack_keys,
    unpack_keys,
)

# (k, v) of one layer; v is None for layers without values.
LayerArrays = Tuple[Any, Any]


def tune_malloc() -> None:
    """Makes glibc keep large buffers, which about doubles the rate of Put and Get. It is a setting
    of the whole process, so a program that moves much KV calls this once, early."""
    _kvstow.tune_malloc()


@dataclasses.dataclass
class _PutRequest:
    """What native_client.cc reads of a put."""

    tokens: Any
    layers: Sequence[LayerArrays]
    tenant: str
    lora_digest: bytes
    multimodal_digests: Sequence[bytes]
    codec: str
    compress_at: str
    durable: bool
    first_block: int


def _put_request(tokens: Any, layers: Any, options: dict) -> _PutRequest:
    request = _PutRequest(
        tokens,
        layers,
        options.pop("tenant", ""),
        options.pop("lora_digest", b""),
        options.pop("multimodal_digests", ()),
        options.pop("codec", "safe"),
        options.pop("compress_at", "service"),
        options.pop("durable", False),
        options.pop("first_block", 0),
    )
    if options:
        raise TypeError(f"put: unknown argument {next(iter(options))!r}")
    KeyContext(request.tenant, request.lora_digest, request.multimodal_digests)
    return request


class Client:
    """A connection to one service. Connects lazily: making one never waits.

    target: "unix:PATH" or "HOST:PORT".
    control_timeout: seconds that one lookup, stat, ... may take.
    data_timeout: seconds that one whole put or get may take.
    num_channels: sockets for bulk data, 1 to 16.
    breaker_errors, breaker_cool_down: after so many failures in a row calls raise UnavailableError
    at once, for so many seconds; then one call tries again.

    Every call ends by its deadline. All methods may be called from any thread and at once. While a
    call waits or copies, other Python threads run. Ctrl-C ends the wait within a tenth of a second;
    a get that was interrupted may still write into its arrays until its deadline.

    After a fork the child raises FailedPreconditionError, also for new clients: start workers by
    "spawn" or "forkserver", or make the first client in the child.
    """

    def __init__(
        self,
        target: str = "unix:/tmp/kvstow.sock",
        *,
        control_timeout: float = 5.0,
        data_timeout: float = 60.0,
        num_channels: int = 2,
        breaker_errors: int = 5,
        breaker_cool_down: float = 2.0,
    ):
        if isinstance(target, str) and target.startswith("/"):
            target = "unix:" + target
        self.target = target
        self._native = _kvstow.Client(
            {
                "target": target,
                "num_channels": num_channels,
                "control_timeout": float(control_timeout),
                "data_timeout": float(data_timeout),
                "breaker_errors": breaker_errors,
                "breaker_cool_down": float(breaker_cool_down),
            }
        )

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self.target!r})"

    def close(self) -> None:
        """Closes the connection. Calls of other threads end as they would have."""
        self._native.close()

    # --- models ---

    def register_model(self, spec: ModelSpec) -> Model:
        """Makes a model known to the service; again is fine.

        Raises InvalidArgumentError naming the field of an unknown or contradictory layout."""
        return Model(self._native.register_model(spec))

    def get_model(self, fingerprint: bytes) -> Model:
        """Raises NotFoundError where the service does not know it."""
        return Model(self._native.get_model(fingerprint))

    # --- blocks ---

    def block_keys(
        self, model: Union[Model, ModelSpec], tokens: Any, **context: Any
    ) -> List[bytes]:
        """kvstow.block_keys."""
        return block_keys(model, tokens, **context)

    def lookup(
        self,
        model_or_keys: Any,
        tokens: Any = None,
        *,
        tenant: str = "",
        lora_digest: bytes = b"",
        multimodal_digests: Sequence[bytes] = (),
    ) -> LookupResult:
        """Which blocks are there: `lookup(model, tokens)` for a prompt, `lookup(keys)` for keys.
        One call for up to 65,536 blocks. Keeps nothing alive."""
        if tokens is None:
            packed = pack_keys(model_or_keys)
        else:
            packed = b"".join(
                block_keys(
                    model_or_keys,
                    tokens,
                    tenant=tenant,
                    lora_digest=lora_digest,
                    multimodal_digests=multimodal_digests,
                )
            )
            if not packed:  # less than a block
                return LookupResult([], b"", 0)
        raw = self._native.lookup(packed)
        raw["keys"] = unpack_keys(raw["keys"])
        return LookupResult(**raw)

    def put(
        self, model: Model, tokens: Any, layers: Sequence[LayerArrays], **options: Any
    ) -> PutResult:
        """Stores the full blocks of a prompt.

        tokens: int [tokens].
        layers: (k, v) per layer, each [tokens, kv heads, head_dim] of the model's dtype, or of
            integers of the same width that carry its bits (uint16 for bf16). Any strides as long
            as each row of head_dim values is contiguous.
        tenant, lora_digest, multimodal_digests: see KeyContext.
        codec: "safe" (the default), "lossless", "small", "raw", "int8", "k=tqm4,v=tq4", ...; then
            layers with a codec of their own: "safe,layer0=raw,layer3-5.k=int8".
        durable: return when the blocks would survive kill -9 of the service.
        compress_at: "service" or "worker": where quantization runs.
        first_block: leave earlier blocks alone; row 0 of the arrays is then the first token of this
            block.
        """
        return PutResult._from(
            self._native.put(model._native, _put_request(tokens, layers, options))
        )

    def put_session(self, model: Model, tokens: Any, **options: Any) -> "PutSession":
        """The same layer by layer, while later layers are still computed; options as of put.

            with client.put_session(model, tokens) as session:
                for i, (k, v) in enumerate(computed_layers):
                    session.put_layer(i, k, v)
            session.result.num_stored

        Leaving the block seals; leaving it by an exception aborts, and nothing stays behind."""
        native = self._native.start_put(model._native, _put_request(tokens, (), options))
        return PutSession(native)

    def get(
        self,
        model: Model,
        keys: Union[Key, Sequence[Key]],
        layers: Sequence[LayerArrays],
        *,
        first_token: int = 0,
    ) -> GetResult:
        """Fills `layers` with the blocks named by `keys`.

        layers: writable arrays (k, v) per layer, as of put; block i goes to rows [first_token +
            i * tokens_per_block, ...). A block that misses leaves its rows untouched, unless it came
            damaged through shared memory.

        Raises where nothing at all came; a miss is no error, see GetResult.blocks."""
        raw = self._native.get(model._native, pack_keys(keys), layers, first_token)
        raw["blocks"] = [_error_of(status) for status in raw["blocks"]]
        return GetResult(**raw)

    def window_buffer(self, num_bytes: int):
        """Memory that put and get leave KV in, without a copy here: the service reads and writes it.

        numpy.frombuffer(buffer, dtype) and the like make arrays of it, which keep it. In place are
        planes whose rows stand one after the other: [heads, tokens, dim] in memory, given as
        array.transpose(1, 0, 2); all else is copied as ever. `is_in_place` turns False when the
        service is gone or a call ended badly: then make another one. After a get that timed out
        further ones into it raise FailedPreconditionError, as the service may still write there.

        Raises UnavailableError where there is no shared memory."""
        return self._native.window_buffer(int(num_bytes))

    def delete(self, keys: Union[Key, Sequence[Key]]) -> int:
        """Forgets blocks; returns how many there were."""
        return self._native.delete(pack_keys(keys))

    def lease(self, keys: Union[Key, Sequence[Key]], ttl: float = 30.0) -> "Lease":
        """Pins what is present of the keys for at most `ttl` seconds.

        with client.lease(keys) as lease:
            client.get(model, keys, layers)
        """
        lease_id, held, granted = self._native.acquire(pack_keys(keys), float(ttl))
        return Lease(self, lease_id, held, granted)

    # --- looking inside ---

    def ping(self, timeout: float = 1.0) -> float:
        """Seconds that the service took to answer."""
        return self._native.ping(float(timeout))

    def stat(self) -> Stat:
        raw = self._native.stat()
        raw["tiers"] = {name: TierStat(**tier) for name, tier in raw["tiers"].items()}
        return Stat(**raw)

    def list_blocks(
        self, model: Optional[Model] = None, *, page_size: int = 1000
    ) -> Iterator[BlockInfo]:
        """All blocks, or those of one model, ascending by key; asks for a page at a time."""
        token = ""
        while True:
            page = self._native.list_blocks(token, page_size, model.fingerprint if model else b"")
            for block in page["blocks"]:
                yield BlockInfo(**block)
            token = page["next_page_token"]
            if not token:
                return

    def verify(self, keys: Sequence[Key] = ()) -> VerifyResult:
        """Has the service read and check records: these, or all. Bad ones are dropped."""
        num_checked, bad_keys = self._native.verify(pack_keys(keys))
        return VerifyResult(num_checked, unpack_keys(bad_keys))

    @property
    def breaker_state(self) -> str:
        """ "closed", "open" or "half-open"."""
        return self._native.breaker_state

    @property
    def corrupt_blocks(self) -> int:
        """Blocks that this client's checks refused."""
        return self._native.corrupt_blocks


class PutSession:
    """A put in progress. One thread at a time."""

    def __init__(self, native: Any):
        self._native = native
        self._lock = threading.Lock()
        self.result: Optional[PutResult] = None  # set by finish()

    def put_layer(self, layer_idx: int, k: Any, v: Any = None) -> None:
        """Sends one layer of all blocks; each layer once, in any order. The arrays (as of put) may
        be overwritten afterwards."""
        with self._exclusive():
            self._native.put_layer(layer_idx, k, v)

    def finish(self) -> PutResult:
        """Seals. Raises FailedPreconditionError where layers are missing."""
        with self._exclusive():
            self.result = PutResult._from(self._native.finish())
        return self.result

    def abort(self) -> None:
        """Gives everything back. Without effect after finish()."""
        with self._exclusive():
            self._native.abort()

    def __enter__(self) -> "PutSession":
        return self

    def __exit__(self, error: Any, *_: Any) -> None:
        if error is not None:
            self.abort()
        elif self.result is None:
            try:
                self.finish()
            except BaseException:
                self.abort()
                raise

    def _exclusive(self) -> "_Exclusive":
        return _Exclusive(self._lock)


class _Exclusive:
    """Refuses, rather than waits for, a second thread."""

    def __init__(self, lock: Any):
        self._lock = lock

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise FailedPreconditionError("put session: another thread is using it")

    def __exit__(self, *_: Any) -> None:
        self._lock.release()


class Lease:
    """Pinned blocks, until release() or the end of its time.

    held: per key, whether it was there and is pinned. ttl: seconds granted.
    """

    def __init__(self, client: Client, lease_id: int, held: List[bool], ttl: float):
        self._client = client
        self.id = lease_id
        self.held = held
        self.ttl = ttl

    def release(self) -> None:
        """Raises NotFoundError where it expired before."""
        lease_id, self.id = self.id, 0
        if lease_id:
            self._client._native.release(lease_id)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, error: Any, *_: Any) -> None:
        try:
            self.release()
        except Error:
            # An expired lease, or a service that is gone, is not what the block was about.
            pass
