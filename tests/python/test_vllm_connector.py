"""KvstowConnector in a double of vLLM's engine, against a real daemon: what the engine says never
depends on the store, only how much it computes."""

import signal
import time

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from engine_double import DoubleOptions, Engine, kv_of, recorded  # noqa: E402
from conftest import ROOT  # noqa: E402

import kvstow  # noqa: E402
from kvstow.vllm import KvstowConnector  # noqa: E402

PROMPT = [7 * i % 1000 for i in range(300)]  # 4 blocks of 64 and a tail
LAYOUTS = ["nominal", "cpu_vec", "kv_first", "kv_second", "latent", "opaque"]


@pytest.fixture
def engines(daemon):
    made = []

    def make(options=None, hook_arguments=None, **extra):
        engine = Engine(KvstowConnector, daemon.target, options, hook_arguments, **extra)
        assert engine.worker.refusal is None and engine.scheduler.refusal is None
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.shutdown()


def flush(engine):
    assert engine.worker._half.saver.flush(30)
    return engine.worker._half.saver.counts


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_second_engine_loads_what_the_first_computed(engines, daemon, layout):
    first = engines(DoubleOptions(layout=layout))
    assert first.run(PROMPT) == first.expected(PROMPT) and first.last_external == 0
    assert flush(first) == {"saved": 4, "existing": 0, "refused": 0, "dropped": 0, "failed": 0}
    second = engines(DoubleOptions(layout=layout))
    assert second.run(PROMPT) == second.expected(PROMPT)
    assert second.last_external == 256
    assert {source.name: n for source, n in second.sources.items()} == {"HOST": 256}
    assert second.worker._half.counts == {"loaded": 4, "load_failures": 0}
    # A prompt that begins alike, then differs.
    other = PROMPT[:150] + [1] * 150
    assert second.run(other) == second.expected(other) and second.last_external == 128
    assert flush(second)["saved"] == 2
    # Nothing but whole blocks, and one token is always computed.
    assert second.run(PROMPT[:64]) == second.expected(PROMPT[:64]) and second.last_external == 0
    assert second.run(PROMPT[:65]) == second.expected(PROMPT[:65]) and second.last_external == 64
    assert second.run(PROMPT[:20]) == second.expected(PROMPT[:20]) and second.last_external == 0


def test_rows_are_the_same_whatever_the_layout(engines, daemon):
    """What is stored is rows, not pages: the store's bytes tell nothing of how pages are packed."""
    stored = []
    for layout in ("nominal", "cpu_vec"):
        engine = engines(DoubleOptions(layout=layout))
        engine.run(PROMPT)
        flush(engine)
        model = engine.worker._half._plan.ranks[0]
        with kvstow.Client(daemon.target) as client:
            rows = [(torch.zeros(256, 2, 32), torch.zeros(256, 2, 32)) for _ in range(3)]
            assert client.get(model, kvstow.block_keys(model, PROMPT), rows).num_leading == 4
        for (k, v), (want_k, want_v) in zip(rows, kv_of(PROMPT[:256], engine.options)):
            assert torch.equal(k, want_k) and torch.equal(v, want_v)
        stored.append(model.fingerprint)
    assert stored[0] != stored[1]  # yet the layout is in the name


@pytest.mark.parametrize(
    "page_tokens, splits, expected", [(16, 1, 64), (32, 2, 64), (128, 4, 128), (96, 1, 96)]
)
def test_page_sizes_map_to_blocks(engines, page_tokens, splits, expected):
    options = dict(page_tokens=page_tokens, splits=splits, layout="cpu_vec")
    engine = engines(DoubleOptions(**options))
    assert engine.worker._half._plan.tokens_per_block == expected
    engine.run(PROMPT)
    flush(engine)
    second = engines(DoubleOptions(**options))
    assert second.run(PROMPT) == second.expected(PROMPT)
    assert second.last_external == (len(PROMPT) - 1) // expected * expected


@pytest.mark.parametrize("chunk", [32, 100, 256])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_chunked_prefill_saves_each_block_once(engines, chunk, async_scheduling):
    options = dict(max_chunk=chunk, async_scheduling=async_scheduling, layout="cpu_vec")
    first = engines(DoubleOptions(**options))
    assert first.run(PROMPT) == first.expected(PROMPT)
    assert flush(first) == {"saved": 4, "existing": 0, "refused": 0, "dropped": 0, "failed": 0}
    second = engines(DoubleOptions(**options))
    assert second.run(PROMPT) == second.expected(PROMPT) and second.last_external == 256


@pytest.mark.parametrize("late_start", [False, True])
def test_layers_are_copied_within_their_hooks(engines, late_start):
    engine = engines(DoubleOptions(late_start=late_start))
    half, copied = engine.worker._half, []
    put_layer, end_step = half.saver.put_layer, half.end_step

    def spy(job, layer_idx, *rest):
        copied.append(layer_idx)
        put_layer(job, layer_idx, *rest)

    half.saver.put_layer = spy
    half.end_step = lambda: (copied.append("end"), end_step())
    engine.run(PROMPT)
    assert copied[:4] == [0, 1, 2, "end"]
    assert flush(engine)["saved"] == 4


def test_pages_of_the_engines_own_cache_are_not_written(engines):
    first = engines(DoubleOptions(layout="cpu_vec"))
    first.run(PROMPT)
    flush(first)
    second = engines(DoubleOptions(layout="cpu_vec"))
    half, written = second.worker._half, []
    store = half._layers["model.layers.0.self_attn.attn"].layout.store

    def spy(cache, ids, rows):
        written.extend(ids.tolist())
        store(cache, ids, rows)

    half._layers["model.layers.0.self_attn.attn"].layout.store = spy
    # 96 tokens: three pages, a block and a half.
    assert second.run(PROMPT, num_local=96) == second.expected(PROMPT)
    assert second.last_external == 160
    assert written == [4, 5, 6, 7, 8]  # pages 1 to 3 are the engine's own


def test_lossy_codecs_come_back_near(engines):
    first = engines(DoubleOptions(layout="cpu_vec", dim=64), codec="safe")
    first.run(PROMPT)
    flush(first)
    second = engines(DoubleOptions(layout="cpu_vec", dim=64), codec="safe")
    pages = {}
    run_step = second._step

    def step(meta, page_ids, *rest):
        result = run_step(meta, page_ids, *rest)
        if page_ids:
            pages["rows"] = second._read(page_ids, 256)
        return result

    second._step = step
    second.run(PROMPT)
    assert second.last_external == 256
    for (k, v), (want_k, want_v) in zip(pages["rows"], kv_of(PROMPT[:256], second.options)):
        assert torch.equal(k[:64], want_k[:64])  # the first block stays raw
        for got, want in ((k, want_k), (v, want_v)):
            error = (got - want).pow(2).sum() / want.pow(2).sum()
            assert 0 < error < 0.02


CHANGES = {
    "weights": dict(weights="double-2"),
    "namespace": dict(namespace="team-b"),
    "block size": dict(tokens_per_block=128),
    "dtype of the computation": dict(options=dict(vllm={"quantization": "awq"})),
    "rope": dict(options=dict(vllm={"hf": {"rope_theta": 5e5}})),
    "page size": dict(options=dict(page_tokens=64)),
    "layers": dict(options=dict(num_layers=4)),
    "ranks": dict(options=dict(vllm={"tensor_parallel_size": 2})),
}


@pytest.mark.parametrize("change", CHANGES)
def test_u04_another_engine_finds_nothing(engines, change):
    first = engines(DoubleOptions())
    first.run(PROMPT)
    flush(first)
    extra = dict(CHANGES[change])
    second = engines(DoubleOptions(**extra.pop("options", {})), **extra)
    assert second.run(PROMPT) == second.expected(PROMPT) and second.last_external == 0
    third = engines(DoubleOptions())
    assert third.run(PROMPT) == third.expected(PROMPT) and third.last_external == 256


def test_u04_requests_differ_by_salt_adapter_and_images(engines, tmp_path):
    class Lora:
        def __init__(self, folder, content):
            self.lora_name, self.lora_path = "adapter", str(tmp_path / folder)
            (tmp_path / folder).mkdir()
            (tmp_path / folder / "adapter_model.safetensors").write_bytes(content)

    class Image:
        def __init__(self, identifier, offset):
            self.identifier, self.mm_position = identifier, type(
                "P", (), dict(offset=offset, length=9)
            )

    requests = [
        {},
        {"cache_salt": "one"},
        {"cache_salt": "two"},
        {"lora_request": Lora("a", b"1")},
        {"lora_request": Lora("b", b"2")},  # the same name, other weights
        {"mm_features": [Image("cat", 3)]},
        {"mm_features": [Image("dog", 3)]},
        {"mm_features": [Image("cat", 4)]},
    ]
    engine = engines(DoubleOptions())
    for fields in requests:
        engine.run(PROMPT, **fields)
        assert engine.last_external == 0, fields
        flush(engine)
    for fields in requests:
        assert engine.run(PROMPT, **fields) == engine.expected(PROMPT)
        assert engine.last_external == 256, fields
    # The same adapter elsewhere is the same adapter.
    engine.run(PROMPT, lora_request=Lora("c", b"1"))
    assert engine.last_external == 256
    # What cannot be named is not served.
    for fields in (
        {"lora_request": type("L", (), {"lora_path": str(tmp_path / "none")})},
        {"prompt_embeds": torch.zeros(3)},
        {"mm_features": [type("M", (), {})]},
    ):
        assert engine.run(PROMPT, **fields) == engine.expected(PROMPT)
        assert engine.last_external == 0, fields


def test_poisoned_planes_are_seen(engines, daemon):
    """The negative control: other rows under the right keys give other tokens."""
    engine = engines(DoubleOptions(layout="cpu_vec"))
    model = engine.worker._half._plan.ranks[0]
    with kvstow.Client(daemon.target) as client:
        client.register_model(model.spec)
        zeros = [(torch.zeros(300, 2, 32), torch.zeros(300, 2, 32))] * 3
        assert client.put(model, PROMPT, zeros, codec="raw").num_stored == 4
    said = engine.run(PROMPT)
    assert engine.last_external == 256 and said != engine.expected(PROMPT)


# --- losing the service ---


def timed(engine, prompt, **fields):
    """Seconds that the prompt waited for the connector."""
    before = engine.waited
    assert engine.run(prompt, **fields) == engine.expected(prompt)
    return engine.waited - before


LIMITS = dict(lookup_timeout=0.4, load_timeout=1.0, save_timeout=1.0)
SLACK_S = 2.0


def test_no_service_at_all(engines, daemon):
    daemon.kill()
    engine = engines(DoubleOptions(), **LIMITS)
    for i in range(4):
        assert timed(engine, [i] + PROMPT) < LIMITS["lookup_timeout"] + SLACK_S
        assert engine.last_external == 0
    start = time.monotonic()
    engine.shutdown()
    assert time.monotonic() - start < 15


def test_a_daemon_killed_before_the_load(engines, daemon):
    first = engines(DoubleOptions(layout="cpu_vec"))
    first.run(PROMPT)
    flush(first)
    second = engines(DoubleOptions(layout="cpu_vec"), **LIMITS)
    killed = []

    def kill():
        if not killed:
            daemon.kill()
            killed.append(True)

    assert timed(second, PROMPT, before_step=kill) < LIMITS["load_timeout"] + SLACK_S
    assert second.last_external == 256 and second.worker._half.counts["load_failures"] == 1
    daemon.start()
    # Another prompt, the same engine, the service is back: both halves heal by themselves.
    limit = time.monotonic() + 20
    while time.monotonic() < limit:
        other = [int(time.monotonic() * 1000)] + PROMPT
        second.run(other)
        second.worker._half.saver.flush(30)
        if second.run(other) == second.expected(other) and second.last_external == 256:
            break
    assert second.last_external == 256


@pytest.mark.parametrize("chunk, async_scheduling", [(1 << 30, False), (40, False), (40, True)])
def test_a_daemon_stopped_during_load_and_save(engines, daemon, chunk, async_scheduling):
    first = engines(DoubleOptions())
    first.run(PROMPT)
    flush(first)
    options = DoubleOptions(max_chunk=chunk, async_scheduling=async_scheduling)
    second = engines(options, **LIMITS)
    stopped = []

    def stop():
        if not stopped:
            daemon.stop_all_threads()
            stopped.append(True)

    prompt = PROMPT[:256] + list(range(300))  # four blocks are stored, four are new
    took = timed(second, prompt, before_step=stop)
    assert second.last_external == 256
    assert LIMITS["load_timeout"] * 0.5 < took < LIMITS["load_timeout"] + SLACK_S
    daemon.signal(signal.SIGCONT)
    second.worker._half.saver.flush(30)
    # Nothing that was computed on pages that never came was stored: a third engine reads right.
    third = engines(DoubleOptions())
    assert third.run(prompt) == third.expected(prompt)
    assert third.last_external >= 256


def test_what_failed_to_load_is_saved_when_it_was_computed_again(engines, daemon):
    first = engines(DoubleOptions())
    first.run(PROMPT)
    flush(first)
    second = engines(DoubleOptions(max_chunk=64, async_scheduling=True))
    gone = []

    def evict():
        if not gone:
            model = second.worker._half._plan.ranks[0]
            with kvstow.Client(daemon.target) as client:
                gone.append(client.delete(kvstow.block_keys(model, PROMPT)[1:]))

    prompt = PROMPT[:256] + list(range(200))
    assert second.run(prompt, before_step=evict) == second.expected(prompt)
    assert gone == [3] and second.last_external == 256
    assert flush(second)["saved"] == 6  # blocks 1 to 6
    third = engines(DoubleOptions())
    assert third.run(prompt) == third.expected(prompt) and third.last_external == 448


def test_a_lookup_never_blocks_the_scheduler(engines, daemon):
    engine = engines(DoubleOptions(), **LIMITS)
    engine.run(PROMPT)
    flush(engine)
    daemon.stop_all_threads()
    from types import SimpleNamespace

    request = SimpleNamespace(request_id="x", prompt_token_ids=[9] + PROMPT)
    answers, longest, start = [], 0.0, time.monotonic()
    while True:
        before = time.monotonic()
        engine.scheduler.on_new_request(request)
        count, is_async = engine.scheduler.get_num_new_matched_tokens(request, 0)
        longest = max(longest, time.monotonic() - before)
        answers.append(count)
        if count is not None:
            break
    daemon.signal(signal.SIGCONT)
    assert answers[-1] == 0 and not is_async and len(answers) > 10
    assert longest < 0.4 and time.monotonic() - start < LIMITS["lookup_timeout"] + SLACK_S


def test_a_full_queue_drops_saves_and_not_the_engine(engines):
    engine = engines(DoubleOptions(), max_pending_bytes=1000)
    assert engine.run(PROMPT) == engine.expected(PROMPT)
    counts = flush(engine)
    assert counts["saved"] == 0 and counts["dropped"] == 1
    assert engine.run(PROMPT) == engine.expected(PROMPT) and engine.last_external == 0


def test_hooks_never_raise(engines):
    engine = engines(DoubleOptions())
    for half, hooks in (
        (
            engine.scheduler,
            ["on_new_request", "get_num_new_matched_tokens", "build_connector_meta"],
        ),
        (engine.scheduler, ["update_state_after_alloc", "request_finished"]),
        (engine.worker, ["register_kv_caches", "start_load_kv", "save_kv_layer"]),
    ):
        for hook in hooks:
            answer = getattr(half, hook)(*[object()] * {"update_state_after_alloc": 3}.get(hook, 2))
            assert not hasattr(answer, "loads") or answer.loads == []
    assert engine.scheduler.get_num_new_matched_tokens(object(), 0) == (0, False)
    assert sum(engine.scheduler._failures.values()) > 0


# --- what is not served, and why ---


def test_policy_fail_saves_and_never_loads(engines):
    first = engines(DoubleOptions(vllm={"policy": "fail"}))
    first.run(PROMPT)
    flush(first)
    assert first.run(PROMPT) == first.expected(PROMPT) and first.last_external == 0
    second = engines(DoubleOptions())
    second.run(PROMPT)
    assert second.last_external == 256


def test_roles(engines):
    consumer = engines(DoubleOptions(vllm={"is_kv_producer": False}))
    consumer.run(PROMPT)
    assert flush(consumer)["saved"] == 0
    producer = engines(DoubleOptions(vllm={"is_kv_consumer": False}))
    producer.run(PROMPT)
    assert flush(producer)["saved"] == 4
    producer.run(PROMPT)
    assert producer.last_external == 0
    consumer.run(PROMPT)
    assert consumer.last_external == 256


def test_recorded_order_of_hooks_is_the_doubles(daemon, engines):
    calls = []

    class Spy(KvstowConnector):
        def __getattribute__(self, name):
            value = super().__getattribute__(name)
            if name in recorded(ROOT / "tests/python/recorded/vllm_0_32.json")["hooks"]:
                calls.append(name)
            return value

    engine = Engine(Spy, daemon.target, DoubleOptions(num_layers=1, late_start=False))
    engine.run(PROMPT)
    engine.shutdown()
    first = [
        calls.index(name)
        for name in (
            "register_kv_caches",
            "get_num_new_matched_tokens",
            "start_load_kv",
            "save_kv_layer",
            "wait_for_save",
            "request_finished",
        )
    ]
    assert first == sorted(first)
