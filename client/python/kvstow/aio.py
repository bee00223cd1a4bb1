"""asyncio: the same client with awaitable methods. Threads do the waiting.

    async with kvstow.aio.Client("unix:/run/kvstow.sock") as client:
        model = await client.register_model(spec)
        found = await client.lookup(model, tokens)
        got = await client.get(model, found.leading_keys, layers)

Cancelling an await ends the wait, not the work: a get may write into its arrays until its deadline.
"""

from __future__ import annotations

import asyncio
import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any, AsyncIterator, Callable, List, Optional, Sequence, Union

from .client import Client as _SyncClient
from .client import LayerArrays
from .client import Lease as _SyncLease
from .client import PutSession as _SyncPutSession
from .types import (
    BlockInfo,
    GetResult,
    Key,
    LookupResult,
    Model,
    ModelSpec,
    PutResult,
    Stat,
    VerifyResult,
    block_keys,
)


class _Threads:
    def __init__(self, max_threads: int):
        self._pool = ThreadPoolExecutor(max_threads, thread_name_prefix="kvstow-aio")

    async def run(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, functools.partial(call, *args, **kwargs))

    def close(self) -> None:
        self._pool.shutdown(wait=False)


class Client:
    """kvstow.Client with awaitable methods; the same arguments, results and exceptions.

    max_threads: how many calls may run at once; further ones wait for their turn.
    """

    def __init__(
        self, target: str = "unix:/tmp/kvstow.sock", *, max_threads: int = 8, **options: Any
    ):
        self._client = _SyncClient(target, **options)
        self._threads = _Threads(max_threads)

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.close()

    async def close(self) -> None:
        await self._threads.run(self._client.close)
        self._threads.close()

    async def register_model(self, spec: ModelSpec) -> Model:
        return await self._threads.run(self._client.register_model, spec)

    async def get_model(self, fingerprint: bytes) -> Model:
        return await self._threads.run(self._client.get_model, fingerprint)

    def block_keys(
        self, model: Union[Model, ModelSpec], tokens: Any, **context: Any
    ) -> List[bytes]:
        return block_keys(model, tokens, **context)

    async def lookup(self, model_or_keys: Any, tokens: Any = None, **context: Any) -> LookupResult:
        return await self._threads.run(self._client.lookup, model_or_keys, tokens, **context)

    async def put(
        self, model: Model, tokens: Any, layers: Sequence[LayerArrays], **options: Any
    ) -> PutResult:
        return await self._threads.run(self._client.put, model, tokens, layers, **options)

    async def put_session(self, model: Model, tokens: Any, **options: Any) -> "PutSession":
        """`async with await client.put_session(model, tokens) as session:`"""
        session = await self._threads.run(self._client.put_session, model, tokens, **options)
        return PutSession(self._threads, session)

    async def get(
        self,
        model: Model,
        keys: Union[Key, Sequence[Key]],
        layers: Sequence[LayerArrays],
        *,
        first_token: int = 0,
    ) -> GetResult:
        return await self._threads.run(
            self._client.get, model, keys, layers, first_token=first_token
        )

    async def window_buffer(self, num_bytes: int) -> Any:
        return await self._threads.run(self._client.window_buffer, num_bytes)

    async def delete(self, keys: Union[Key, Sequence[Key]]) -> int:
        return await self._threads.run(self._client.delete, keys)

    async def lease(self, keys: Union[Key, Sequence[Key]], ttl: float = 30.0) -> "Lease":
        """`async with await client.lease(keys) as lease:`"""
        return Lease(self._threads, await self._threads.run(self._client.lease, keys, ttl))

    async def ping(self, timeout: float = 1.0) -> float:
        return await self._threads.run(self._client.ping, timeout)

    async def stat(self) -> Stat:
        return await self._threads.run(self._client.stat)

    async def list_blocks(
        self, model: Optional[Model] = None, *, page_size: int = 1000
    ) -> AsyncIterator[BlockInfo]:
        blocks = self._client.list_blocks(model, page_size=page_size)
        end = object()
        while (block := await self._threads.run(next, blocks, end)) is not end:
            yield block

    async def verify(self, keys: Sequence[Key] = ()) -> VerifyResult:
        return await self._threads.run(self._client.verify, keys)

    @property
    def breaker_state(self) -> str:
        return self._client.breaker_state

    @property
    def corrupt_blocks(self) -> int:
        return self._client.corrupt_blocks


class PutSession:
    """kvstow.PutSession with awaitable methods."""

    def __init__(self, threads: _Threads, session: _SyncPutSession):
        self._threads = threads
        self._session = session

    @property
    def result(self) -> Optional[PutResult]:
        return self._session.result

    async def put_layer(self, layer_idx: int, k: Any, v: Any = None) -> None:
        await self._threads.run(self._session.put_layer, layer_idx, k, v)

    async def finish(self) -> PutResult:
        return await self._threads.run(self._session.finish)

    async def abort(self) -> None:
        await self._threads.run(self._session.abort)

    async def __aenter__(self) -> "PutSession":
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._threads.run(self._session.__exit__, *error)


class Lease:
    """kvstow.Lease with awaitable methods."""

    def __init__(self, threads: _Threads, lease: _SyncLease):
        self._threads = threads
        self._lease = lease

    @property
    def held(self) -> List[bool]:
        return self._lease.held

    async def release(self) -> None:
        await self._threads.run(self._lease.release)

    async def __aenter__(self) -> "Lease":
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._threads.run(self._lease.__exit__, *error)
