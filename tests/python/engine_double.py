"""A double of vLLM's engine: scheduler, pages and a "model", which call a connector's hooks in the
order that was recorded of the real one.

The model's KV at a position follows from all tokens up to it, and what the model says follows from
the KV that it reads back from its pages: a page with anything else in it gives other tokens.
"""

from __future__ import annotations

import dataclasses
import json
import time
from types import SimpleNamespace
from typing import Any, Dict, List

import torch

from kvstow.vllm.pages import LAYOUTS


class FullAttentionSpec(SimpleNamespace):
    pass


class SlidingWindowSpec(SimpleNamespace):
    pass


class MLAAttentionSpec(FullAttentionSpec):
    pass


class MambaSpec(SimpleNamespace):
    pass


class HfConfig:
    def __init__(self, **values):
        self.architectures = ["DoubleForCausalLM"]
        self._values = {"rope_theta": 10000.0, **values}

    def to_dict(self):
        return dict(self._values)


@dataclasses.dataclass
class DoubleOptions:
    layout: str = "nominal"
    num_layers: int = 3
    heads: int = 2
    dim: int = 32
    page_tokens: int = 32
    num_pages: int = 64
    splits: int = 1  # pages of the tensor per page of the scheduler
    max_chunk: int = 1 << 30  # tokens of one step
    async_scheduling: bool = False
    late_start: bool = (
        True  # start_load_kv comes after the pass where nothing is loaded, as in 0.32
    )
    kv_cache_spec: Any = None
    groups: Any = None
    vllm: Dict[str, Any] = dataclasses.field(default_factory=dict)


def configs(target: str, options: DoubleOptions, **extra: Any):
    """(vllm_config, kv_cache_config) of the engine."""
    hf = HfConfig(**options.vllm.pop("hf", {}))
    overrides = options.vllm
    kind = MLAAttentionSpec if options.layout == "latent" else FullAttentionSpec
    spec = options.kv_cache_spec or kind(
        block_size=options.page_tokens,
        num_kv_heads=1 if options.layout == "latent" else options.heads,
        head_size=options.dim,
        dtype=torch.float32,
    )
    names = [f"model.layers.{i}.self_attn.attn" for i in range(options.num_layers)]
    groups = options.groups or [SimpleNamespace(layer_names=names, kv_cache_spec=spec)]
    config = {
        "target": target,
        "codec": "lossless",
        "weights": "double-1",
        "page_layout": options.layout,
        **extra,
    }
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(
            model="double",
            revision=None,
            dtype=torch.float32,
            quantization=overrides.get("quantization"),
            max_model_len=4096,
            hf_config=hf,
            hf_text_config=hf,
        ),
        cache_config=SimpleNamespace(
            block_size=options.page_tokens,
            cache_dtype=overrides.get("cache_dtype", "auto"),
            calculate_kv_scales=overrides.get("calculate_kv_scales", False),
        ),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=overrides.get("pipeline_parallel_size", 1),
            tensor_parallel_size=overrides.get("tensor_parallel_size", 1),
            rank=overrides.get("rank", 0),
        ),
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config=config,
            kv_load_failure_policy=overrides.get("policy", "recompute"),
            is_kv_consumer=overrides.get("is_kv_consumer", True),
            is_kv_producer=overrides.get("is_kv_producer", True),
        ),
    )
    return vllm_config, SimpleNamespace(kv_cache_groups=groups)


def kv_of(tokens: List[int], options: DoubleOptions):
    """[(k, v)] per layer, each [tokens, heads, dim]: what a forward pass computes for a prompt."""
    states, state = [], 1
    for token in tokens:
        state = (state * 6364136223846793005 + token + 1442695040888963407) % (1 << 48)
        states.append(state / (1 << 48))
    heads = 1 if options.layout == "latent" else options.heads
    phase = torch.tensor(states, dtype=torch.float64)[:, None, None]
    place = torch.arange(heads * options.dim, dtype=torch.float64).view(heads, options.dim)
    layers = []
    for layer in range(options.num_layers):
        pair = [
            torch.sin(phase * (97.0 + layer) + place * (0.37 + role)).to(torch.float32)
            for role in (0, 1)
        ]
        layers.append((pair[0], None) if options.layout == "latent" else tuple(pair))
    return layers


def empty_pages(options: DoubleOptions):
    pages, tokens = options.num_pages * options.splits, options.page_tokens // options.splits
    heads, dim = options.heads, options.dim
    shapes = {
        "nominal": (pages, heads, tokens, 2 * dim),
        "cpu_vec": (pages, heads, tokens, 2 * dim),
        "opaque": (pages, heads, tokens, 2 * dim),
        "kv_first": (2, pages, tokens, heads, dim),
        "kv_second": (pages, 2, tokens, heads, dim),
        "latent": (pages, tokens, dim),
    }
    return torch.full(shapes[options.layout], float("nan"))


class Timed:
    """A connector, and the seconds that its hooks took: what the engine waited for it."""

    def __init__(self, connector):
        self.connector = connector
        self.seconds = 0.0

    def __getattr__(self, name):
        value = getattr(self.connector, name)
        if not callable(value) or name.startswith("_"):
            return value

        def timed(*args, **kwargs):
            start = time.monotonic()
            try:
                return value(*args, **kwargs)
            finally:
                self.seconds += time.monotonic() - start

        return timed


class Engine:
    """One scheduler and one worker in one process."""

    def __init__(self, connector_class, target, options=None, hook_arguments=None, **extra):
        self.options = options = options or DoubleOptions()
        self.more = hook_arguments or {}
        vllm_config, kv_cache_config = configs(target, options, **extra)
        self.worker = Timed(connector_class(vllm_config, "WORKER", kv_cache_config))
        self.caches = {
            f"model.layers.{i}.self_attn.attn": empty_pages(options)
            for i in range(options.num_layers)
        }
        # What the engine itself reads and writes pages by; opaque pages are packed as cpu_vec.
        own = "cpu_vec" if options.layout == "opaque" else options.layout
        heads = 1 if own == "latent" else options.heads
        self.layout = LAYOUTS[own](heads, options.dim, 0 if own == "latent" else options.dim)
        self.worker.register_kv_caches(self.caches)
        self.scheduler = Timed(connector_class(vllm_config, "SCHEDULER", kv_cache_config))
        self.free = list(range(options.num_pages - 1, 0, -1))  # page 0 is the null page
        self.steps = 0
        self.last_external = 0
        self.sources = {}
        self.lookup_seconds = 0.0

    @property
    def waited(self):
        """Seconds that requests waited for the connector."""
        return self.worker.seconds + self.scheduler.seconds + self.lookup_seconds

    def shutdown(self):
        self.scheduler.shutdown()
        self.worker.shutdown()

    # --- what the real one would say, and says ---

    def expected(self, prompt):
        return self._say(kv_of(prompt, self.options))

    def run(self, prompt, num_local=0, before_step=None, **request_fields):
        """Serves one request of one output; what the model says. `num_local`: tokens that this
        engine's own prefix cache holds (they are computed first)."""
        request = SimpleNamespace(
            request_id=f"r{self.steps}-{id(prompt)}",
            prompt_token_ids=list(prompt),
            all_token_ids=list(prompt),
            num_tokens=len(prompt),
            lora_request=None,
            cache_salt=None,
            mm_features=[],
            prompt_embeds=None,
        )
        request.__dict__.update(request_fields)
        self.scheduler.on_new_request(request, **self.more)
        external, start = None, time.monotonic()
        while external is None:
            external, is_async = self.scheduler.get_num_new_matched_tokens(
                request, num_local, **self.more
            )
            assert not is_async
        self.lookup_seconds += time.monotonic() - start
        assert external >= 0 and num_local + external < len(prompt)
        self.last_external = external
        count = -(-len(prompt) // self.options.page_tokens)
        pages = [self.free.pop() for _ in range(count)]
        if num_local:
            self._write(pages, prompt, 0, num_local)
        blocks = SimpleNamespace(get_block_ids=lambda: (pages,))
        self.scheduler.update_state_after_alloc(request, blocks, external, **self.more)
        self.sources = self.scheduler.get_external_cache_hit_sources(request, external)
        computed = num_local + external
        said, is_new, in_flight = None, True, []
        while said is None:
            # With asynchronous scheduling the next step is made before this one's errors are known.
            depth = 2 if self.options.async_scheduling else 1
            while len(in_flight) < depth and computed < len(prompt):
                scheduled = min(len(prompt) - computed, self.options.max_chunk)
                output = self._output(request, pages, computed, scheduled, is_new)
                in_flight.append(
                    (computed, scheduled, self.scheduler.build_connector_meta(output, **self.more))
                )
                is_new = False
                computed += scheduled
            start, scheduled, meta = in_flight.pop(0)
            if before_step:
                before_step()
            said, errors = self._step(meta, pages, prompt, start, scheduled)
            bad = [
                i
                for i, page in enumerate(pages)
                if page in errors and i * self.options.page_tokens < start
            ]
            if bad:  # as the scheduler does it under "recompute"
                said = None
                computed = bad[0] * self.options.page_tokens
                for _, _, meta in in_flight:  # steps under way are run, and thrown away
                    self._step(meta, pages, prompt, start, 0)
                in_flight = []
            elif start + scheduled < len(prompt):
                said = None
        self.scheduler.request_finished(request, pages, **self.more)
        self.free.extend(reversed(pages))
        finished = self._output(request, [], 0, 0, False)
        finished.finished_req_ids = {request.request_id}
        finished.scheduled_cached_reqs.req_ids.clear()
        self._step(self.scheduler.build_connector_meta(finished, **self.more), [], [], 0, 0)
        return said

    # --- within ---

    def _output(self, request, pages, computed, scheduled, is_new):
        cached = SimpleNamespace(
            req_ids=[] if is_new else [request.request_id],
            resumed_req_ids=set(),
            new_block_ids=[None],
            num_computed_tokens=[computed],
        )
        new = SimpleNamespace(
            req_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            block_ids=(list(pages),),
            num_computed_tokens=computed,
        )
        return SimpleNamespace(
            scheduled_new_reqs=[new] if is_new else [],
            scheduled_cached_reqs=cached,
            num_scheduled_tokens={request.request_id: scheduled},
            finished_req_ids=set(),
        )

    def _step(self, meta, pages, prompt, start, scheduled):
        self.steps += 1
        worker = self.worker
        worker.bind_connector_metadata(meta)
        is_late = self.options.late_start and not meta.loads
        if not is_late:
            worker.start_load_kv(SimpleNamespace(attn_metadata={}), **self.more)
        new_rows = kv_of(prompt[: start + scheduled], self.options) if scheduled else []
        for i, (name, cache) in enumerate(self.caches.items()):
            worker.wait_for_layer_load(name, **self.more)
            if scheduled:
                self._write_layer(cache, pages, new_rows[i], start, start + scheduled)
            worker.save_kv_layer(name, cache, SimpleNamespace(), **self.more)
        if is_late:
            worker.start_load_kv(SimpleNamespace(attn_metadata={}), **self.more)
        worker.wait_for_save(**self.more)
        finished = worker.get_finished(set(), **self.more)
        assert finished == (None, None)
        errors = worker.get_block_ids_with_load_errors(**self.more)
        worker.clear_connector_metadata()
        said = self._say(self._read(pages, start + scheduled)) if scheduled else None
        return said, errors

    def _ids(self, pages):
        ids = torch.tensor(pages)
        splits = self.options.splits
        return ids if splits == 1 else (ids[:, None] * splits + torch.arange(splits)).flatten()

    def _read(self, pages, num_tokens):
        layers = []
        for cache in self.caches.values():
            k, v = self.layout.rows(self.layout.pick(cache, self._ids(pages)))
            layers.append((k[:num_tokens], None if v is None else v[:num_tokens]))
        return layers

    def _write_layer(self, cache, pages, rows, start, end):
        """Rows [start, end) into pages, whatever the others hold."""
        before = self.layout.rows(self.layout.pick(cache, self._ids(pages)))
        for part, new in zip(before, rows):
            if part is not None:
                part[start:end] = new[start:end]
        self.layout.store(cache, self._ids(pages), before)

    def _write(self, pages, prompt, start, end):
        for i, cache in enumerate(self.caches.values()):
            self._write_layer(cache, pages, kv_of(prompt[:end], self.options)[i], start, end)

    @staticmethod
    def _say(layers):
        """Tokens that depend on every value of every row."""
        total = 0.0
        for i, pair in enumerate(layers):
            for part in pair:
                if part is not None:
                    weights = torch.arange(1, part.numel() + 1, dtype=torch.float64) % 1009
                    total += float((part.double().flatten() * weights).sum()) * (i + 1)
        return round(total, 3)


def recorded(path):
    with open(path) as file:
        return json.load(file)
