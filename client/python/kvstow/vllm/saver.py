"""Saver: sends copies of pages to the service on a thread of its own, layer by layer.

    job = saver.open(order)
    saver.put_layer(job, 0, layout, layout.pick(cache, page_ids))
    ...
    saver.close(job)

Bounded: copies that wait take at most `max_pending_bytes`; beyond it the job is dropped, and the
blocks are a miss later. Nothing here raises or waits for the service.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
from typing import Any, Callable, Dict, Optional

from ..client import Client, PutSession
from ..errors import Error, FailedPreconditionError, NotFoundError
from ..types import Model
from . import engine
from .config import ConnectorConfig
from .messages import SaveOrder
from .pages import PageLayout


@dataclasses.dataclass(eq=False)
class SaveJob:
    order: SaveOrder
    session: Optional[PutSession] = None
    is_dropped: bool = False


class Saver:
    def __init__(self, model: Model, config: ConnectorConfig):
        self._model = model
        self._config = config
        self._client = Client(
            config.target,
            control_timeout=config.save_timeout,
            data_timeout=config.save_timeout,
        )
        self._is_registered = False
        self._work: "queue.SimpleQueue[Optional[Callable[[], None]]]" = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pending_bytes = 0
        # saved, existing, refused: blocks. dropped: prompts, for want of room. failed: prompts.
        self.counts: Dict[str, int] = dict.fromkeys(
            ("saved", "existing", "refused", "dropped", "failed"), 0
        )
        self._thread = threading.Thread(target=self._run, name="kvstow-save", daemon=True)
        self._thread.start()

    def open(self, order: SaveOrder) -> SaveJob:
        job = SaveJob(order)
        self._work.put(lambda: self._open(job))
        return job

    def put_layer(self, job: SaveJob, layer_idx: int, layout: PageLayout, picked: Any) -> None:
        num_bytes = picked.numel() * picked.element_size()
        with self._lock:
            if self._pending_bytes + num_bytes > self._config.max_pending_bytes:
                job.is_dropped = True
                return
            self._pending_bytes += num_bytes

        def work() -> None:
            try:
                if job.session is not None and not job.is_dropped:
                    k, v = layout.rows(picked)
                    job.session.put_layer(layer_idx, k, v)
            finally:
                with self._lock:
                    self._pending_bytes -= num_bytes

        self._work.put(lambda: self._guard(job, work))

    def close(self, job: SaveJob) -> None:
        self._work.put(lambda: self._guard(job, lambda: self._close(job)))

    def drop(self, job: SaveJob) -> None:
        job.is_dropped = True
        self.close(job)

    def flush(self, timeout: float) -> bool:
        """Waits until all that was handed over is stored or given up."""
        done = threading.Event()
        self._work.put(done.set)
        return self._thread.is_alive() and done.wait(timeout)

    def shutdown(self, timeout: float) -> None:
        self.flush(timeout)
        self._work.put(None)
        self._thread.join(self._config.save_timeout + 1)
        self._client.close()

    # --- on the thread ---

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def _guard(self, job: SaveJob, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._give_up(job, error)

    def _give_up(self, job: SaveJob, error: Exception) -> None:
        self.counts["failed"] += 1
        if self.counts["failed"] & (self.counts["failed"] - 1) == 0:
            engine.logger.warning(
                "kvstow: a prompt was not saved (%d times): %s: %s",
                self.counts["failed"],
                type(error).__name__,
                error,
            )
        session, job.session = job.session, None
        if session is not None:
            try:
                session.abort()
            except Error:
                pass  # its tickets end by themselves

    def _open(self, job: SaveJob) -> None:
        if job.is_dropped:
            return
        try:
            self._register()
            try:
                job.session = self._start(job.order)
            except (NotFoundError, FailedPreconditionError):
                self._is_registered = False  # another service than the one that knew the model
                self._register()
                job.session = self._start(job.order)
        except Exception as error:
            self._give_up(job, error)

    def _register(self) -> None:
        if not self._is_registered:
            self._client.register_model(self._model.spec)
            self._is_registered = True

    def _start(self, order: SaveOrder) -> PutSession:
        return self._client.put_session(
            self._model,
            order.tokens,
            codec=self._config.codec,
            durable=self._config.durable,
            tenant=order.context.tenant,
            lora_digest=order.context.lora_digest,
            multimodal_digests=order.context.multimodal_digests,
            first_block=order.first_block,
        )

    def _close(self, job: SaveJob) -> None:
        session, job.session = job.session, None
        if job.is_dropped:
            self.counts["dropped"] += 1
            if session is not None:
                session.abort()
            return
        if session is None:
            return  # given up before
        result = session.finish()
        self.counts["saved"] += result.num_stored
        self.counts["existing"] += result.num_existing
        self.counts["refused"] += result.num_refused
        if result.first_refusal is not None:
            engine.logger.warning(
                "kvstow: %d blocks of a prompt were refused: %s",
                result.num_refused,
                result.first_refusal,
            )
