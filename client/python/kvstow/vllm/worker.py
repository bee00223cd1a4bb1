"""The worker's half: pages to and from the store, one rank's layers and heads.

Loads run on threads of their own and write into pages when a block's bytes were checked; the first
attention layer waits for them, at most `load_timeout`. Saves are copies of pages, taken within the
layer's hook; the Saver sends them.
"""

from __future__ import annotations

import atexit
import dataclasses
import threading
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError
from typing import Any, Dict, List, Optional, Set, Tuple

from ..client import Client
from ..errors import Error
from ..types import block_keys
from . import engine
from .config import ConnectorConfig
from .messages import LoadOrder, SaveOrder, StepOrders
from .pages import LAYOUTS, PageLayout, layout_of_shape
from .plan import LayerShape, Plan
from .saver import SaveJob, Saver

MAX_LOAD_THREADS = 8
# A load that is past its deadline ends by its own; this is for the scheduling of its thread.
GRACE_S = 1.0


@dataclasses.dataclass
class LayerPages:
    idx: int
    layout: PageLayout
    cache: Any
    splits: int  # pages of the tensor per page of the engine


class LoadJob:
    """One order. Writes into pages only while it has not been given up."""

    def __init__(self, order: LoadOrder, deadline: float):
        self.order = order
        self.deadline = deadline
        self.good_tokens = order.first_token  # up to here the pages hold the prompt's KV
        self.why_short = ""  # why not more of them do
        self._lock = threading.Lock()
        self._is_given_up = False

    def store(self, write: Any, good_tokens: int) -> bool:
        with self._lock:
            if self._is_given_up:
                return False
            write()
            self.good_tokens = good_tokens
            return True

    def give_up(self) -> None:
        with self._lock:
            self._is_given_up = True


class WorkerHalf:
    def __init__(self, plan: Plan, config: ConnectorConfig, rank: int = 0):
        self._plan = plan
        self._config = config
        self._model = plan.ranks[rank]
        self._client = Client(
            config.target, control_timeout=config.load_timeout, data_timeout=config.load_timeout
        )
        self.saver = Saver(self._model, config)
        self._threads = ThreadPoolExecutor(MAX_LOAD_THREADS, thread_name_prefix="kvstow-load")
        self._layers: Dict[str, LayerPages] = {}
        self.reason = "no pages are registered yet"  # why nothing is loaded or saved; "" when it is
        self._orders = StepOrders()
        self._begun = self._orders
        self._loads: List[Tuple[LoadJob, "Future[None]"]] = []
        self._errors: Set[int] = set()  # to report
        self._bad_pages: Set[int] = set()  # they do not hold what the engine believes they hold
        self._jobs: Optional[List[SaveJob]] = None  # of the step; None: not opened yet
        self._seen_layers: Set[str] = set()
        # blocks loaded; loads that did not come in full
        self.counts = {"loaded": 0, "load_failures": 0}
        _shut_down_at_exit(self)

    # --- hooks ---

    def register(self, kv_caches: Dict[str, Any]) -> None:
        layers = {}
        try:
            for idx, shape in enumerate(self._plan.layers):
                layers[shape.name] = self._pages_of(idx, shape, kv_caches.get(shape.name))
        except ValueError as error:
            self.reason = str(error)
            engine.logger.warning("kvstow: nothing is loaded or saved: %s", error)
            return
        self._layers = layers
        self.reason = ""

    def begin_step(self, orders: StepOrders) -> None:
        """Called by whichever hook of the step comes first: minors differ in which that is."""
        if orders is self._begun:
            return
        self._begun = self._orders = orders
        self._jobs = None
        self._seen_layers = set()
        if self.reason:
            for order in orders.loads:  # promised by the scheduler's half, which cannot know
                self._mark_bad(order, order.first_token)
            return
        deadline = time.monotonic() + self._config.load_timeout
        for order in orders.loads:
            job = LoadJob(order, deadline)
            self._loads.append((job, self._threads.submit(self._load, job)))

    def wait_for_loads(self) -> None:
        loads, self._loads = self._loads, []
        for job, future in loads:
            try:
                left = job.deadline + GRACE_S - time.monotonic()
                future.result(max(left, 0.0))
            except TimeoutError:
                job.why_short = "no answer in time"
            except Exception as error:
                job.why_short = f"{type(error).__name__}: {error}"
            job.give_up()
            wanted = len(job.order.tokens)
            first_block_token = job.order.first_block * self._plan.tokens_per_block
            self.counts["loaded"] += max(0, job.good_tokens - first_block_token) // (
                self._plan.tokens_per_block
            )
            self._bad_pages.difference_update(self._pages_between(job.order, job.good_tokens))
            if job.good_tokens < wanted:
                self._note(job, wanted)
                self._mark_bad(job.order, job.good_tokens)

    def save_layer(self, layer_name: str, cache: Any) -> None:
        layer = self._layers.get(layer_name)
        if layer is None or not self._orders.saves or layer_name in self._seen_layers:
            return
        self.wait_for_loads()
        self._seen_layers.add(layer_name)
        for job in self._save_jobs():
            if job.is_dropped:
                continue
            try:
                first_page = job.order.first_block * self._plan.pages_per_block
                page_ids = self._page_ids(job.order.pages[first_page:], layer)
                picked = layer.layout.pick(cache, page_ids)
                self.saver.put_layer(job, layer.idx, layer.layout, picked)
            except Exception as error:
                job.is_dropped = True
                engine.logger.warning("kvstow: pages of %s were not copied: %s", layer_name, error)

    def end_step(self) -> None:
        self.wait_for_loads()
        if self._orders.saves and not self.reason:
            for name, layer in self._layers.items():  # where the engine does not call layer hooks
                self.save_layer(name, layer.cache)
            for job in self._save_jobs():
                self.saver.close(job)
        self._orders = StepOrders()
        self._jobs = None

    def take_load_errors(self) -> Set[int]:
        errors, self._errors = self._errors, set()
        return errors

    def shutdown(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.saver.shutdown(self._config.shutdown_timeout)
        self._client.close()

    # --- within ---

    def _pages_of(self, idx: int, shape: LayerShape, cache: Any) -> LayerPages:
        if isinstance(cache, (list, tuple)) and len(cache) == 1:
            cache = cache[0]
        if not hasattr(cache, "index_select"):
            raise ValueError(f"{shape.name}: {type(cache).__name__}, want its tensor of pages")
        name = self._plan.page_layout
        if name == "auto":
            name = layout_of_shape(tuple(cache.shape)) or (
                "latent" if shape.kind == "mla" else "nominal"
            )
        layout = LAYOUTS[name](shape.heads, shape.k_dim, shape.v_dim)
        tokens = layout.tokens_per_page(cache)
        if tokens < 1 or self._plan.page_tokens % tokens != 0:
            raise ValueError(
                f"{shape.name}: pages of {tokens} tokens, want a part of {self._plan.page_tokens}"
            )
        return LayerPages(idx, layout, cache, self._plan.page_tokens // tokens)

    def _page_ids(self, pages: List[int], layer: LayerPages) -> Any:
        import torch

        ids = torch.tensor(pages, dtype=torch.int64)
        if layer.splits == 1:
            return ids
        return (ids[:, None] * layer.splits + torch.arange(layer.splits)).flatten()

    def _load(self, job: LoadJob) -> None:
        """On a thread. Ends by the deadline and the duration of one get."""
        order, size = job.order, self._plan.tokens_per_block
        context = dataclasses.asdict(order.context)
        keys = block_keys(self._model, order.tokens, **context)[order.first_block :]
        batch = max(1, self._config.load_batch_bytes // self._model.block_bytes)
        for first in range(0, len(keys), batch):
            if time.monotonic() >= job.deadline:
                job.why_short = "no time left to ask for more"
                return
            part = keys[first : first + batch]
            rows = [
                layer.layout.empty_rows(layer.cache, len(part) * size)
                for layer in self._layers.values()
            ]
            got = self._client.get(self._model, part, rows)
            leading = got.num_leading
            if leading < len(part):
                job.why_short = str(got.blocks[leading])
            first_token = (order.first_block + first) * size
            end_token = first_token + leading * size
            if leading == 0 or not job.store(
                lambda: self._store(order, rows, first_token, end_token), end_token
            ):
                return
            if leading < len(part):
                return

    def _store(self, order: LoadOrder, rows: List[Any], first_token: int, end_token: int) -> None:
        """Rows of tokens [first_token, end_token) into their pages, but for tokens that were there
        before: others may be reading those pages."""
        page_tokens = self._plan.page_tokens
        start = max(first_token, order.first_token)
        skipped = start - first_token
        pages = order.pages[start // page_tokens : end_token // page_tokens]
        count = end_token - start
        for layer, (k, v) in zip(self._layers.values(), rows):
            kept_v = None if v is None else v[skipped : skipped + count]
            layer.layout.store(
                layer.cache, self._page_ids(pages, layer), (k[skipped : skipped + count], kept_v)
            )
        device = next(iter(self._layers.values())).cache.device
        if device.type == "cuda":
            import torch

            torch.cuda.current_stream(device).synchronize()

    def _pages_between(self, order: LoadOrder, end_token: int) -> List[int]:
        page_tokens = self._plan.page_tokens
        return order.pages[order.first_token // page_tokens : end_token // page_tokens]

    def _mark_bad(self, order: LoadOrder, good_tokens: int) -> None:
        bad = order.pages[good_tokens // self._plan.page_tokens :]
        self._errors.update(bad)
        self._bad_pages.update(bad)
        self.counts["load_failures"] += 1

    def _save_jobs(self) -> List[SaveJob]:
        if self._jobs is None:
            self._jobs = [
                self.saver.open(order) for order in self._orders.saves if self._is_sound(order)
            ]
        return self._jobs

    def _is_sound(self, order: SaveOrder) -> bool:
        """Whether what the pass computes rests on pages that hold what the engine believes they
        hold. A failed load makes nonsense of the rest of its prompt until that is computed again.
        """
        num_before = -(-order.computed_from // self._plan.page_tokens)
        if self._bad_pages.intersection(order.pages[:num_before]):
            return False
        if 0 in order.pages:  # the null page: tokens that the engine dropped
            return False
        self._bad_pages.difference_update(order.pages[num_before:])
        return True

    def _note(self, job: LoadJob, wanted: int) -> None:
        took = time.monotonic() - job.deadline + self._config.load_timeout
        engine.logger.warning(
            "kvstow: %d of %d tokens came in %.1f s, the rest is computed: %s",
            job.good_tokens,
            wanted,
            took,
            job.why_short,
        )


def _shut_down_at_exit(half: WorkerHalf) -> None:
    """Engines in process do not always say goodbye; their last prompts are stored all the same."""
    alive = weakref.ref(half)

    def shut_down() -> None:
        found = alive()
        if found is not None:
            try:
                found.saver.flush(found._config.shutdown_timeout)
            except Error:
                pass

    atexit.register(shut_down)
