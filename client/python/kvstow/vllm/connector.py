"""KvstowConnector: vLLM's KVConnectorBase_V1 over a kvstow sidecar.

Losing the sidecar costs latency: no hook raises, and what cannot be loaded is computed. Arguments
that a newer vLLM adds to hooks are accepted and ignored.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

from . import engine
from .config import ConnectorConfig
from .messages import StepOrders
from .plan import Refusal, make_plan
from .scheduler import SchedulerHalf
from .worker import WorkerHalf


def _serving(otherwise: Callable[[], Any]) -> Callable[[Any], Any]:
    """For hooks of the serving path: where there is no half to ask, or it fails, `otherwise()`."""

    def decorate(hook: Any) -> Any:
        @functools.wraps(hook)
        def guarded(self: "KvstowConnector", *args: Any, **kwargs: Any) -> Any:
            if self._half is None:
                return otherwise()
            try:
                return hook(self, *args, **kwargs)
            except Exception:
                self._note_failure(hook.__name__)
                return otherwise()

        return guarded

    return decorate


def _nothing() -> None:
    return None


class KvstowConnector(engine.KVConnectorBase_V1):
    _cache_hit_source = engine.CacheHitSource.HOST

    def __init__(
        self, vllm_config: Any, role: Any, kv_cache_config: Any = None, *_: Any, **others: Any
    ):
        """Raises ValueError for a wrong kv_connector_extra_config. An engine whose KV cannot be
        kept runs without; `refusal` then says why."""
        arguments = {"vllm_config": vllm_config, "role": role, "kv_cache_config": kv_cache_config}
        engine.init_base(self, {**others, **arguments})
        transfer = vllm_config.kv_transfer_config
        self._config = ConnectorConfig.of(getattr(transfer, "kv_connector_extra_config", None))
        self._failures: Dict[str, int] = {}
        self._half: Any = None
        self.refusal: Optional[str] = None
        is_scheduler = getattr(role, "name", str(role)).upper().endswith("SCHEDULER")
        try:
            plan = make_plan(vllm_config, kv_cache_config, self._config)
            if is_scheduler:
                self._half = SchedulerHalf(plan, self._config)
            else:
                self._half = WorkerHalf(plan, self._config, _rank_of(vllm_config))
        except Refusal as refusal:
            self.refusal = str(refusal)
            engine.logger.warning("kvstow: this engine is not served: %s", refusal)

    def _note_failure(self, hook: str) -> None:
        count = self._failures.get(hook, 0) + 1
        self._failures[hook] = count
        if count & (count - 1) == 0:
            engine.logger.exception("kvstow: %s failed (%d times); the engine goes on", hook, count)

    # --- class level ---

    @classmethod
    def get_required_kvcache_layout(cls, *_: Any, **__: Any) -> Optional[str]:
        return None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, *_: Any, **__: Any) -> bool:
        return True  # the layer hooks do the work

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a save that is lost is a miss later

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        return False

    # --- worker ---

    @_serving(_nothing)
    def register_kv_caches(self, kv_caches: Dict[str, Any], *_: Any, **__: Any) -> None:
        self._half.register(kv_caches)

    @_serving(_nothing)
    def start_load_kv(self, forward_context: Any = None, *_: Any, **__: Any) -> None:
        self._begin_step()

    @_serving(_nothing)
    def wait_for_layer_load(self, layer_name: str, *_: Any, **__: Any) -> None:
        self._begin_step()
        self._half.wait_for_loads()

    @_serving(_nothing)
    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any = None, *_: Any, **__: Any
    ) -> None:
        self._begin_step()
        self._half.save_layer(layer_name, kv_layer)

    @_serving(_nothing)
    def wait_for_save(self, *_: Any, **__: Any) -> None:
        self._begin_step()
        self._half.end_step()

    @_serving(lambda: (None, None))
    def get_finished(
        self, finished_req_ids: Any = None, *_: Any, **__: Any
    ) -> Tuple[Optional[Set[str]], Optional[Set[str]]]:
        return None, None  # loads end within their step, saves are copies

    @_serving(set)
    def get_block_ids_with_load_errors(self, *_: Any, **__: Any) -> Set[int]:
        return self._half.take_load_errors()

    def shutdown(self, *_: Any, **__: Any) -> None:
        half, self._half = self._half, None
        if half is not None:
            half.shutdown()

    # --- scheduler ---

    @_serving(_nothing)
    def on_new_request(self, request: Any, *_: Any, **__: Any) -> None:
        self._half.new_request(request)

    @_serving(lambda: (0, False))
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int, *_: Any, **__: Any
    ) -> Tuple[Optional[int], bool]:
        return self._half.matched(request, num_computed_tokens)

    @_serving(_nothing)
    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int, *_: Any, **__: Any
    ) -> None:
        self._half.allocated(request, num_external_tokens)

    @_serving(dict)
    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int, *_: Any, **__: Any
    ) -> Dict[Any, int]:
        return self._half.hit_sources(request, num_external_tokens)

    @_serving(StepOrders)
    def build_connector_meta(self, scheduler_output: Any, *_: Any, **__: Any) -> Any:
        return self._half.orders(scheduler_output)

    @_serving(lambda: (False, None))
    def request_finished(
        self, request: Any, block_ids: Any = None, *_: Any, **__: Any
    ) -> Tuple[bool, Optional[Dict[str, Any]]]:
        self._half.finished(request)
        return False, None

    # --- within ---

    def _begin_step(self) -> None:
        orders = getattr(self, "_connector_metadata", None)
        if isinstance(orders, StepOrders):
            self._half.begin_step(orders)


def _rank_of(vllm_config: Any) -> int:
    size = getattr(vllm_config.parallel_config, "tensor_parallel_size", 1)
    if size <= 1:
        return 0
    try:
        from vllm.distributed import get_tensor_model_parallel_rank

        return get_tensor_model_parallel_rank()
    except (ImportError, AssertionError):
        return getattr(vllm_config.parallel_config, "rank", 0) % size


__all__: List[str] = ["KvstowConnector"]
