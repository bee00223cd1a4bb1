"""The connector's signatures and configuration: needs neither vLLM nor torch nor a service."""

import inspect
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from conftest import BUILD, ROOT

from kvstow.vllm import KvstowConnector
from kvstow.vllm.config import ConnectorConfig
from kvstow.vllm.scheduler import SchedulerHalf
from kvstow.vllm.plan import Refusal, _order, make_plan, weights_identity

RECORDED = sorted((ROOT / "tests/python/recorded").glob("vllm_*.json"))


class FullAttentionSpec(SimpleNamespace):
    pass


class SlidingWindowSpec(SimpleNamespace):
    pass


class MambaSpec(SimpleNamespace):
    pass


class MLAAttentionSpec(FullAttentionSpec):
    pass


class ChunkedLocalAttentionSpec(SimpleNamespace):
    pass


def test_recorded_minors_are_there():
    assert [path.stem for path in RECORDED] == ["vllm_0_31", "vllm_0_32"]


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_hooks_take_what_the_engine_gives_and_more(path):
    engine = json.loads(path.read_text())
    assert set(engine["abstract"]) <= set(engine["hooks"])
    for name in engine["abstract"]:
        assert name in KvstowConnector.__dict__, f"{name} is abstract in {engine['engine']}"
    overridden = [name for name in engine["hooks"] if name in KvstowConnector.__dict__]
    assert len(overridden) >= len(engine["abstract"]) + 5
    for name in overridden:
        given = engine["hooks"][name]["parameters"]
        signature = inspect.signature(getattr(KvstowConnector, name))
        me = [] if engine["hooks"][name]["kind"] == "class" else [None]
        if name == "__init__":
            assert "kv_cache_config" in signature.parameters  # factories look for it
        more = {"argument_of_a_later_minor": 1}
        signature.bind(*me, *given, **more)
        signature.bind(*me, *given, "one more")
        signature.bind(*me, **dict.fromkeys(given), **more)
    for name in engine["properties"]:
        ours = KvstowConnector.__dict__.get(name)
        assert ours is None or isinstance(ours, property)


def test_it_imports_without_vllm_and_torch():
    program = (
        "import sys\n"
        "for name in ('torch', 'vllm', 'transformers', 'numpy'): sys.modules[name] = None\n"
        "import kvstow.vllm, kvstow.hf, kvstow.aio\n"
        "print(kvstow.vllm.KvstowConnector.__name__)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(BUILD / "client" / "python")},
        capture_output=True,
        text=True,
    )
    assert run.stdout == "KvstowConnector\n", run.stderr


def engine_of(spec=None, groups=None, dtype="torch.bfloat16", **changes):
    spec = spec or FullAttentionSpec(block_size=32, num_kv_heads=4, head_size=64, dtype=dtype)
    names = [f"model.layers.{i}.self_attn.attn" for i in range(12)]
    groups = groups or [SimpleNamespace(layer_names=names[::-1], kv_cache_spec=spec)]
    model = {"model": "org/m", "revision": "abc", "dtype": dtype, "max_model_len": 4096}
    vllm = SimpleNamespace(
        model_config=SimpleNamespace(**{**model, **changes.pop("model", {})}),
        cache_config=SimpleNamespace(**{"cache_dtype": "auto", **changes.pop("cache", {})}),
        parallel_config=SimpleNamespace(**changes.pop("parallel", {})),
        kv_transfer_config=SimpleNamespace(),
    )
    assert not changes
    return vllm, SimpleNamespace(kv_cache_groups=groups)


def plan_of(extra=None, **changes):
    return make_plan(
        *engine_of(**changes), ConnectorConfig.of({"page_layout": "nominal", **(extra or {})})
    )


def test_layers_are_in_order_and_sizes_fit():
    plan = plan_of()
    assert [shape.name for shape in plan.layers] == [
        f"model.layers.{i}.self_attn.attn" for i in range(12)
    ]
    assert sorted(["l.10.a", "l.9.a", "l.1.b", "l.1.a"], key=_order) == [
        "l.1.a",
        "l.1.b",
        "l.9.a",
        "l.10.a",
    ]
    spec = plan.ranks[0].spec
    assert (spec.kv_dtype, spec.tokens_per_block, len(spec.groups)) == ("bf16", 64, 1)
    assert spec.weights == "hub:org/m@abc" and spec.rope.startswith("config-sha256:")
    for page_tokens, block in ((16, 64), (32, 64), (48, 96), (64, 64), (128, 128), (1024, 1024)):
        spec = FullAttentionSpec(
            block_size=page_tokens, num_kv_heads=4, head_size=64, dtype="torch.float16"
        )
        assert plan_of(spec=spec).tokens_per_block == block
    assert plan_of({"tokens_per_block": 256}).pages_per_block == 8


def test_ranks_have_names_of_their_own():
    plan = plan_of(parallel={"tensor_parallel_size": 4})
    assert len({model.fingerprint for model in plan.ranks}) == 4


class FakeClient:
    """Answers lookups with what it was given."""

    def __init__(self, locations):
        self.locations, self.num_keys = bytes(locations), 0

    def lookup(self, keys):
        self.num_keys = len(keys)
        return SimpleNamespace(locations=self.locations)

    def close(self):
        pass


def matched(half, request, num_computed):
    while True:
        count, is_async = half.matched(request, num_computed)
        assert not is_async
        if count is not None:
            return count


def test_hits_are_what_all_ranks_have_and_named_by_the_slowest_tier():
    plan = plan_of(parallel={"tensor_parallel_size": 2})
    client = FakeClient([1, 3, 2, 1] + [1, 2, 2, 0])
    half = SchedulerHalf(plan, ConnectorConfig.of({}), client)
    request = SimpleNamespace(request_id="r", prompt_token_ids=list(range(300)))
    assert matched(half, request, 0) == 192 and client.num_keys == 8
    sources = {source.name: n for source, n in half.hit_sources(request, 192).items()}
    assert sources == {"HOST": 64, "DISK": 128}
    # What the engine has itself counts to nobody.
    assert matched(half, request, 96) == 96
    assert {s.name: n for s, n in half.hit_sources(request, 96).items()} == {"DISK": 96}
    assert matched(half, request, 256) == 0 and half.hit_sources(request, 0) == {}
    half.shutdown()


def sliding(window):
    return SlidingWindowSpec(
        block_size=32, num_kv_heads=4, head_size=64, dtype="torch.bfloat16", sliding_window=window
    )


def test_windows_are_served_where_all_pages_are_kept():
    plan = plan_of(spec=sliding(4096))
    assert {shape.kind for shape in plan.layers} == {"sliding"}
    # The hybrid allocator is off: full allocation, and layers that only look at a window.
    uniform = SimpleNamespace(
        kv_cache_specs={
            "model.layers.0.attn": FullAttentionSpec(
                block_size=32,
                num_kv_heads=4,
                head_size=64,
                dtype="torch.bfloat16",
                sliding_window=512,
            ),
            "model.layers.1.attn": FullAttentionSpec(
                block_size=32,
                num_kv_heads=2,
                head_size=128,
                dtype="torch.bfloat16",
                sliding_window=None,
            ),
        }
    )
    plan = plan_of(
        groups=[SimpleNamespace(layer_names=list(uniform.kv_cache_specs), kv_cache_spec=uniform)]
    )
    assert [(s.kind, s.heads, s.k_dim) for s in plan.layers] == [
        ("sliding", 4, 64),
        ("full", 2, 128),
    ]


def test_latents():
    spec = MLAAttentionSpec(
        block_size=64, num_kv_heads=1, head_size=576, dtype="torch.bfloat16", head_size_v=0
    )
    plan = plan_of({"page_layout": "latent"}, spec=spec)
    assert plan.ranks[0].layer_shapes[0] == (1, 576, 0)
    assert plan.ranks[0].spec.groups[0].kind == "mla"


group = SimpleNamespace(layer_names=["a.0"], kv_cache_spec=sliding(64))
REFUSED = {
    "hybrid": (dict(groups=[group, group]), "--disable-hybrid-kv-cache-manager"),
    "no groups": (dict(groups=[SimpleNamespace(enable_kv_transfer=False)]), "no KV cache groups"),
    "window": (dict(spec=sliding(512)), "window of 512 tokens and max_model_len is 4096"),
    "mamba": (dict(spec=MambaSpec()), "MambaSpec: recurrent state"),
    "chunked": (dict(spec=ChunkedLocalAttentionSpec()), "pages outside the chunk"),
    "scales elsewhere": (dict(cache={"cache_dtype": "int8_per_token_head"}), "int8_per_token_head"),
    "packed": (dict(cache={"cache_dtype": "fp8_ds_mla"}), "fp8_ds_mla"),
    "scales of the day": (
        dict(cache={"cache_dtype": "fp8", "calculate_kv_scales": True}),
        "calculate_kv_scales",
    ),
    "pipeline": (dict(parallel={"pipeline_parallel_size": 2}), "pipeline_parallel_size is 2"),
    "context": (dict(parallel={"decode_context_parallel_size": 2}), "decode context parallel"),
    "revision": (dict(model={"revision": None}), "the revision of 'org/m' is not known"),
    "odd blocks": (dict(extra={"tokens_per_block": 72}), "multiple of 32"),
    "long blocks": (dict(extra={"tokens_per_block": 2048}), "at most 1024"),
    "layout": (dict(extra={"page_layout": "sideways"}), "sideways"),
    "doubles": (dict(dtype="torch.float64"), "float64"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_served_says_why(case):
    changes, match = REFUSED[case]
    with pytest.raises(Refusal, match=match):
        plan_of(**changes)


def test_a_refused_engine_runs_as_without():
    vllm, cache = engine_of(groups=[group, group])
    vllm.kv_transfer_config.kv_connector_extra_config = {}
    connector = KvstowConnector(vllm, SimpleNamespace(name="SCHEDULER"), cache, later_argument=1)
    assert "--disable-hybrid-kv-cache-manager" in connector.refusal
    request = SimpleNamespace(request_id="r", prompt_token_ids=[1] * 999)
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert connector.build_connector_meta(None).loads == []
    assert connector.request_finished(request, []) == (False, None)
    assert connector.get_block_ids_with_load_errors() == set()
    for hook in (connector.start_load_kv, connector.wait_for_save, connector.shutdown):
        assert hook() is None


def test_weights_are_known_by_their_bytes(tmp_path):
    def identity(folder):
        return weights_identity(SimpleNamespace(model=str(folder), revision="main"))

    for name, content in (("a", b"12"), ("b", b"12"), ("c", b"13")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(content)
        (tmp_path / name / "README.md").write_bytes(name.encode())
    assert identity(tmp_path / "a") == identity(tmp_path / "b") != identity(tmp_path / "c")
    (tmp_path / "empty").mkdir()
    with pytest.raises(Refusal, match="no weight files"):
        identity(tmp_path / "empty")
    hub = SimpleNamespace(
        model="org/m", revision="main", hf_config=SimpleNamespace(_commit_hash="c0")
    )
    assert weights_identity(hub) == "hub:org/m@c0"


@pytest.mark.parametrize(
    "extra, match",
    [
        ({"targt": "unix:/x"}, "'targt' is not known, did you mean 'target'"),
        ({"codec": "saef"}, "saef"),
        ({"load_timeout": "5"}, "load_timeout is '5', want float"),
        ({"load_timeout": 0}, "load_timeout"),
        ({"max_pending_bytes": -1}, "max_pending_bytes"),
        ({"durable": 1}, "durable is 1, want bool"),
    ],
)
def test_wrong_settings_are_errors_at_start(extra, match):
    with pytest.raises(ValueError, match=match):
        ConnectorConfig.of(extra)
    assert ConnectorConfig.of({"load_timeout": 3}).load_timeout == 3.0
