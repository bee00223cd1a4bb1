"""The scheduler's half: which prompts are in the store, and what the workers should load and save.

Never waits: lookups run on threads of their own, and a prompt whose answer is not there yet is
asked for again in the next step.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Dict, List, Optional, Tuple

from ..client import Client
from ..errors import Error
from ..types import DRAM, HBM, NVME, KeyContext, block_keys
from . import engine
from .config import ConnectorConfig
from .messages import LoadOrder, SaveOrder, StepOrders
from .plan import Plan, Refusal, adapter_digest

# A lookup's answer is good for so long: blocks come and go.
ANSWER_LIFE_S = 5.0
# Beyond the lookup's own deadline: threads may be busy with other prompts.
PATIENCE_S = 1.0
MAX_TENANT_BYTES = 512


@dataclasses.dataclass
class Answer:
    context: KeyContext
    locations: bytes  # per block of the prompt, all ranks agreed
    num_leading: int


@dataclasses.dataclass
class PromptState:
    """A request that the engine has not finished."""

    request: Any
    tokens: List[int]  # the prompt
    lookup: Optional["Future[Answer]"] = None
    asked_at: float = 0.0
    is_served: bool = True
    answer: Optional[Answer] = None  # the last
    num_external: int = 0  # tokens to load at the next step
    pages: List[int] = dataclasses.field(default_factory=list)
    next_block: int = 0  # the first that no order to save covers
    done_tokens: int = 0  # as many were computed, or are by a step under way


def is_plain_prompt(request: Any) -> bool:
    """Tokens alone, with images named by digest: what a key can cover."""
    return (
        getattr(request, "prompt_token_ids", None) is not None
        and getattr(request, "prompt_embeds", None) is None
        and getattr(request, "prompt_is_token_ids", None) is None
    )


def context_of(request: Any, namespace: str) -> KeyContext:
    """Raises Refusal where something that decides the KV cannot be named."""
    salt = getattr(request, "cache_salt", None) or ""
    tenant = f"{len(namespace)}:{namespace}{salt}" if namespace or salt else ""
    if len(tenant.encode()) > MAX_TENANT_BYTES:
        tenant = "sha256:" + hashlib.sha256(tenant.encode()).hexdigest()
    digests = []
    for feature in getattr(request, "mm_features", None) or ():
        name = getattr(feature, "identifier", None) or getattr(feature, "mm_hash", None)
        if not name:
            raise Refusal("a multimodal input has no digest")
        place = getattr(feature, "mm_position", None)
        where = (getattr(place, "offset", ""), getattr(place, "length", ""))
        digests.append(hashlib.sha256(f"{where}:{name}".encode()).digest())
    return KeyContext(
        tenant, adapter_digest(getattr(request, "lora_request", None)), tuple(digests)
    )


class SchedulerHalf:
    def __init__(self, plan: Plan, config: ConnectorConfig, client: Optional[Client] = None):
        self._plan = plan
        self._config = config
        self._client = client or Client(
            config.target,
            control_timeout=config.lookup_timeout,
            data_timeout=config.load_timeout,
            num_channels=1,
        )
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="kvstow-lookup")
        self._prompts: Dict[str, PromptState] = {}
        self._refusals: Dict[str, int] = {}

    # --- hooks ---

    def new_request(self, request: Any) -> None:
        if request.request_id in self._prompts:
            return
        state = PromptState(request, list(getattr(request, "prompt_token_ids", None) or ()))
        state.is_served = (
            is_plain_prompt(request) and len(state.tokens) >= self._plan.tokens_per_block
        )
        self._prompts[request.request_id] = state
        if state.is_served:
            self._ask(state)

    def matched(self, request: Any, num_computed: int) -> Tuple[Optional[int], bool]:
        self.new_request(request)
        state = self._prompts[request.request_id]
        state.num_external = 0
        if not state.is_served:
            return 0, False
        now = time.monotonic()
        if state.lookup is None or (state.lookup.done() and now - state.asked_at > ANSWER_LIFE_S):
            self._ask(state)
        assert state.lookup is not None
        if not state.lookup.done():
            if now - state.asked_at < self._config.lookup_timeout + PATIENCE_S:
                return None, False
            return 0, False
        state.answer = self._answer(state)
        if state.answer is None:
            return 0, False
        if state.next_block == 0:
            state.next_block = state.answer.num_leading  # those are stored
        if not self._plan.can_load:
            return 0, False
        # At least one token is computed: its logits are what the request came for.
        size = self._plan.tokens_per_block
        usable = min(state.answer.num_leading, (len(state.tokens) - 1) // size) * size
        return max(0, usable - num_computed), False

    def allocated(self, request: Any, num_external: int) -> None:
        state = self._prompts.get(request.request_id)
        if state is not None:
            state.num_external = num_external

    def hit_sources(self, request: Any, num_external: int) -> Dict[Any, int]:
        """Tokens by tier; the load ends where the usable prefix ends."""
        state = self._prompts.get(request.request_id)
        if num_external == 0:
            return {}
        if state is None or state.answer is None:
            return {engine.CacheHitSource.EXTERNAL_UNSPECIFIED: num_external}
        size = self._plan.tokens_per_block
        last = min(state.answer.num_leading, (len(state.tokens) - 1) // size) * size
        sources: Dict[Any, int] = {}
        for token in range(last - num_external, last, self._plan.page_tokens):
            location = state.answer.locations[token // size]
            hit = engine.CacheHitSource.HOST if location & (DRAM | HBM) else engine.CacheHitSource.DISK
            sources[hit] = sources.get(hit, 0) + self._plan.page_tokens
        return sources

    def orders(self, output: Any) -> StepOrders:
        orders = StepOrders(finished=sorted(getattr(output, "finished_req_ids", None) or ()))
        for new in output.scheduled_new_reqs:
            state = self._prompts.get(new.req_id)
            if state is None:
                continue
            state.pages = list(new.block_ids[0])
            scheduled = output.num_scheduled_tokens.get(new.req_id, 0)
            self._order(orders, new.req_id, state, new.num_computed_tokens, scheduled)
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            state = self._prompts.get(request_id)
            if state is None:
                continue
            new_pages = cached.new_block_ids[i]
            if _is_resumed(cached, i, request_id):
                state.pages = list(new_pages[0]) if new_pages else []
            elif new_pages:
                state.pages.extend(new_pages[0])
            scheduled = output.num_scheduled_tokens.get(request_id, 0)
            self._order(orders, request_id, state, cached.num_computed_tokens[i], scheduled)
        return orders

    def finished(self, request: Any) -> None:
        self._prompts.pop(request.request_id, None)

    def shutdown(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    # --- within ---

    def _order(
        self, orders: StepOrders, request_id: str, state: PromptState, computed: int, scheduled: int
    ) -> None:
        if not state.is_served or state.answer is None:
            return
        size, pages_per_block = self._plan.tokens_per_block, self._plan.pages_per_block
        context = state.answer.context
        if state.num_external > 0:
            last_block = -(-computed // size)
            first_token = computed - state.num_external
            orders.loads.append(
                LoadOrder(
                    request_id,
                    context,
                    state.tokens[: last_block * size],
                    first_token // size,
                    first_token,
                    state.pages[: last_block * pages_per_block],
                )
            )
            state.num_external = 0
        if not self._plan.can_save:
            return
        # Tokens that the engine computes again, after a failed load or a preemption, are saved
        # again where they are not stored.
        if computed < state.done_tokens:
            state.next_block = min(state.next_block, computed // size)
        state.done_tokens = computed + scheduled
        num_blocks = min(computed + scheduled, len(state.tokens)) // size
        if num_blocks <= state.next_block:
            return
        orders.saves.append(
            SaveOrder(
                request_id,
                context,
                state.tokens[: num_blocks * size],
                state.next_block,
                state.pages[: num_blocks * pages_per_block],
                computed,
            )
        )
        state.next_block = num_blocks

    def _ask(self, state: PromptState) -> None:
        state.asked_at = time.monotonic()
        state.lookup = self._threads.submit(self._look_up, state.request, state.tokens)

    def _look_up(self, request: Any, tokens: List[int]) -> Answer:
        """On a thread. Every rank has blocks of its own: what is there is what all have."""
        context = context_of(request, self._config.namespace)
        keys: List[bytes] = []
        for model in self._plan.ranks:
            keys += block_keys(
                model,
                tokens,
                tenant=context.tenant,
                lora_digest=context.lora_digest,
                multimodal_digests=context.multimodal_digests,
            )
        found = self._client.lookup(keys).locations
        num_blocks = len(keys) // len(self._plan.ranks)
        shards = [
            found[i * num_blocks : (i + 1) * num_blocks] for i in range(len(self._plan.ranks))
        ]
        # The slowest tier of a block's shards; absent where any is.
        locations = bytes(
            0 if 0 in shard else DRAM if all(c & (DRAM | HBM) for c in shard) else NVME
            for shard in zip(*shards)
        )
        leading = next((i for i, there in enumerate(locations) if not there), num_blocks)
        return Answer(context, locations, leading)

    def _answer(self, state: PromptState) -> Optional[Answer]:
        assert state.lookup is not None
        try:
            return state.lookup.result(0)
        except Refusal as refusal:
            state.is_served = False
            self._note(str(refusal))
        except Error as error:
            # No service, no hits; what is computed is offered to it all the same.
            self._note(f"{type(error).__name__}: {error}")
            state.lookup = None
            return self._answer_without_service(state)
        return None

    def _answer_without_service(self, state: PromptState) -> Optional[Answer]:
        try:
            return Answer(context_of(state.request, self._config.namespace), b"", 0)
        except Refusal:
            state.is_served = False
            return None

    def _note(self, reason: str) -> None:
        """Logs what happens the first time, and then each time the count doubles."""
        count = self._refusals.get(reason, 0) + 1
        self._refusals[reason] = count
        if len(self._refusals) > 1000:
            self._refusals.clear()
        if count & (count - 1) == 0:
            engine.logger.warning("kvstow: no lookup (%d times): %s", count, reason)


def _is_resumed(cached: Any, i: int, request_id: str) -> bool:
    resumed = getattr(cached, "resumed_req_ids", None)
    if resumed is not None:
        return request_id in resumed
    flags = getattr(cached, "resumed_from_preemption", None)  # minors before
    return bool(flags[i]) if flags else False
