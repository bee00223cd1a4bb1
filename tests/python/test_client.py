"""kvstow.Client against a real daemon: bytes, keys, errors."""

import json
import subprocess
import sys

import numpy
import pytest
from conftest import CLI, FIXTURE, ROOT, Daemon, Fixture, eventually, same

import kvstow


def test_raw_of_real_kv_comes_back_byte_for_byte(client, kv):
    model = client.register_model(kv.spec)
    put = client.put(model, kv.tokens, kv.layers, codec="lossless")
    assert (put.num_stored, put.num_existing, put.num_refused) == (4, 0, 0)
    assert put.first_refusal is None and put.num_leftover_tokens == 0

    found = client.lookup(model, kv.tokens)
    assert found.num_leading == 4 and found.keys == put.keys
    assert all(location & kvstow.DRAM for location in found.locations)
    got_layers = kv.empty_layers()
    got = client.get(model, found.leading_keys, got_layers)
    assert got.num_leading == 4 and got.blocks == [None] * 4
    assert same(got_layers, kv.layers)
    assert client.put(model, kv.tokens, kv.layers).num_existing == 4


def test_kv_in_a_window_buffer_comes_back_in_place(client, kv):
    def in_window(layers):
        buffer = client.window_buffer(sum(a.nbytes for pair in layers for a in pair))
        assert buffer.is_in_place
        memory, at, views = numpy.frombuffer(buffer, numpy.uint8), 0, []
        for pair in layers:
            arrays = []
            for a in pair:
                flat = memory[at : at + a.nbytes].view(a.dtype)
                at += a.nbytes
                arrays.append(
                    flat.reshape(a.shape[1], a.shape[0], a.shape[2]).transpose(1, 0, 2)
                )
                arrays[-1][...] = a
            views.append(tuple(arrays))
        return views

    model = client.register_model(kv.spec)
    source, result = in_window(kv.layers), in_window(kv.empty_layers())
    put = client.put(model, kv.tokens, source, codec="lossless")
    assert put.num_stored == 4
    assert client.get(model, put.keys, result).num_leading == 4
    assert same(result, kv.layers)


def test_a_lossy_codec_comes_back_near_and_smaller(client, kv):
    model = client.register_model(kv.spec)
    client.put(model, kv.tokens, kv.layers, codec="int8")
    got_layers = kv.empty_layers()
    client.get(model, client.lookup(model, kv.tokens).keys, got_layers)

    def as_float(bits):
        return (bits.astype(numpy.uint32) << 16).view(numpy.float32)

    for (k, _), (want, _) in zip(got_layers, kv.layers):
        error = as_float(k) - as_float(want)
        assert 0 < (error**2).sum() < 0.001 * (as_float(want) ** 2).sum()
    stat = client.stat()
    assert stat.codecs["int8"]["record_bytes"] < 0.6 * stat.codecs["int8"]["logical_bytes"]


def test_a_miss_leaves_its_rows_and_says_so(client, kv):
    model = client.register_model(kv.spec)
    keys = client.put(model, kv.tokens, kv.layers, codec="raw").keys
    assert client.delete(keys[2]) == 1
    got_layers = kv.empty_layers()
    got = client.get(model, keys, got_layers)
    assert got.num_leading == 2
    assert [type(block) for block in got.blocks] == [
        type(None),
        type(None),
        kvstow.NotFoundError,
        type(None),
    ]
    assert not got_layers[0][0][128:192].any()
    assert (got_layers[0][0][192:] == kv.layers[0][0][192:]).all()


def test_get_into_the_middle_of_a_longer_prompt(client, kv):
    model = client.register_model(kv.spec)
    keys = client.put(model, kv.tokens, kv.layers, codec="raw").keys
    got_layers = kv.empty_layers()
    client.get(model, keys[1:3], got_layers, first_token=64)
    k, want = got_layers[7][0], kv.layers[7][0]
    assert not k[:64].any() and not k[192:].any() and (k[64:192] == want[64:192]).all()


def test_put_from_a_first_block_on_leaves_earlier_ones_alone(client, kv):
    model = client.register_model(kv.spec)
    tail = [(k[128:], v[128:]) for k, v in kv.layers]
    put = client.put(model, kv.tokens, tail, codec="raw", first_block=2)
    assert put.num_stored == 2 and len(put.keys) == 4
    assert list(client.lookup(put.keys).locations) == [0, 0, kvstow.DRAM, kvstow.DRAM]
    head = [(k[:64], v[:64]) for k, v in kv.layers]
    with client.put_session(model, kv.tokens[:128], codec="raw", first_block=1) as session:
        for i, (k, v) in enumerate(kv.layers):
            session.put_layer(i, k[64:128], v[64:128])
    assert session.result.num_stored == 1
    assert client.put(model, kv.tokens[:64], head, codec="raw").num_stored == 1
    got_layers = kv.empty_layers()
    assert client.get(model, put.keys, got_layers).num_leading == 4
    assert same(got_layers, kv.layers)
    for wrong in (-1, 4):
        with pytest.raises(kvstow.InvalidArgumentError, match="first_block: "):
            client.put(model, kv.tokens, tail, first_block=wrong)


def test_u05_keys_are_the_command_lines_and_no_hash_seed_changes_them(daemon, kv):
    printed = subprocess.run(
        [CLI, "key", FIXTURE, "--tenant", "team-a"], check=True, capture_output=True, text=True
    ).stdout.split()
    assert len(printed) == 4
    program = (
        "import sys; sys.path.insert(0, 'tests/python'); import conftest, kvstow, hashlib\n"
        "kv = conftest.Fixture()\n"
        f"client = kvstow.Client({daemon.target!r})\n"
        "model = client.register_model(kv.spec)\n"
        "put = client.put(model, kv.tokens, kv.layers, codec='raw', tenant='team-a')\n"
        "layers = kv.empty_layers()\n"
        "client.get(model, put.keys, layers)\n"
        "digest = hashlib.sha256(b''.join(a.tobytes() for pair in layers for a in pair))\n"
        "print(put.num_stored, digest.hexdigest(), *(key.hex() for key in put.keys))\n"
    )
    runs = []
    for seed in ("0", "1", "4711"):
        run = subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env={"PYTHONHASHSEED": seed, "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stderr
        runs.append(run.stdout.split())
    assert [run[0] for run in runs] == ["4", "0", "0"]  # stored once, then there
    assert {tuple(run[2:]) for run in runs} == {tuple(printed)}
    assert len({run[1] for run in runs}) == 1
    # And the command line reads what Python put.
    written = f"{daemon.socket}.safetensors"
    subprocess.run(
        [CLI, "get", "--keys", ",".join(printed), "--target", daemon.target, "-o", written],
        check=True,
        capture_output=True,
    )
    back = Fixture(written)
    assert same(back.layers, kv.layers)


def test_u05_keys_survive_a_restart(tmp_path, kv):
    daemon = Daemon(tmp_path, nvme="64MiB").start()
    with kvstow.Client(daemon.target) as client:
        model = client.register_model(kv.spec)
        keys = client.put(model, kv.tokens, kv.layers, codec="raw", durable=True).keys
        daemon.kill()
        daemon.start()
        got_layers = kv.empty_layers()
        with kvstow.Client(daemon.target) as other:
            # The first call may find out that the old connection is gone.
            found = eventually(lambda: other.lookup(kvstow.Model(kv.spec), kv.tokens))
            assert found.keys == keys and found.num_leading == 4
            assert other.get(model, keys, got_layers).num_leading == 4
        assert same(got_layers, kv.layers)
    daemon.kill()


@pytest.mark.parametrize(
    "change",
    [
        {"tenant": "team-b"},
        {"lora_digest": b"\x01" * 32},
        {"multimodal_digests": (b"\x02" * 32,)},
    ],
)
def test_u04_another_context_is_another_key(kv, change):
    assert set(kvstow.block_keys(kv.spec, kv.tokens)).isdisjoint(
        kvstow.block_keys(kv.spec, kv.tokens, **change)
    )


def test_keys_do_not_depend_on_how_tokens_are_given(kv):
    keys = kvstow.block_keys(kv.spec, kv.tokens)
    spaced = numpy.zeros(512, "i8")[::2]
    spaced[:] = kv.tokens
    for tokens in (kv.tokens.tolist(), tuple(kv.tokens), kv.tokens.astype("u2"), spaced):
        assert kvstow.block_keys(kv.spec, tokens) == keys
    assert kvstow.block_keys(kv.spec, kv.tokens[:63]) == []
    for wrong in (
        [1, "2"],
        [2**31],
        [1.5],
        "text",
        numpy.zeros(3),
        numpy.zeros((2, 2), "i4"),
        None,
    ):
        with pytest.raises(kvstow.InvalidArgumentError, match="tokens"):
            kvstow.block_keys(kv.spec, wrong)


def test_put_session_seals_at_its_end_and_aborts_on_an_exception(client, kv):
    model = client.register_model(kv.spec)
    with pytest.raises(ZeroDivisionError):
        with client.put_session(model, kv.tokens, codec="raw") as session:
            session.put_layer(0, *kv.layers[0])
            raise ZeroDivisionError
    assert client.lookup(model, kv.tokens).num_leading == 0
    assert client.stat().open_tickets == 0
    with pytest.raises(kvstow.FailedPreconditionError, match="layers are missing"):
        with client.put_session(model, kv.tokens, codec="raw") as session:
            session.put_layer(3, *kv.layers[3])
    assert client.stat().open_tickets == 0
    with client.put_session(model, kv.tokens, codec="raw") as session:
        for i in reversed(range(30)):
            k, v = (array.copy() for array in kv.layers[i])
            session.put_layer(i, k, v)
            k[:], v[:] = 0, 0  # it was read
        with pytest.raises(kvstow.InvalidArgumentError, match="put before"):
            session.put_layer(0, *kv.layers[0])
    assert session.result.num_stored == 4
    with pytest.raises(kvstow.FailedPreconditionError, match="finished or aborted"):
        session.put_layer(0, *kv.layers[0])
    got_layers = kv.empty_layers()
    client.get(model, session.result.keys, got_layers)
    assert same(got_layers, kv.layers)


def test_leases_pin_and_are_given_back(client, kv):
    model = client.register_model(kv.spec)
    keys = client.put(model, kv.tokens, kv.layers).keys
    with client.lease(keys + [b"\0" * 32], ttl=20) as lease:
        assert lease.held == [True] * 4 + [False] and 0 < lease.ttl <= 20
        assert client.stat().open_leases == 1
        assert all(block.is_pinned for block in client.list_blocks(model))
    assert client.stat().open_leases == 0
    with pytest.raises(kvstow.NotFoundError):
        client._native.release(12345)
    with pytest.raises(kvstow.InvalidArgumentError):
        client.lease(keys, ttl=1e9)


def test_listing_and_verifying(client, kv):
    model = client.register_model(kv.spec)
    keys = client.put(model, kv.tokens, kv.layers, codec="k=tqm4,v=tq4").keys
    assert sorted(block.key for block in client.list_blocks(page_size=3)) == sorted(keys)
    other = client.register_model(
        kvstow.ModelSpec.uniform("x", "y", num_layers=1, num_kv_heads=1, head_dim=64)
    )
    assert list(client.list_blocks(other)) == []
    assert client.verify().num_checked == 4 and client.verify(keys[:1]).bad_keys == []
    assert client.ping() < 5 and client.breaker_state == "closed" and client.corrupt_blocks == 0
    assert client.get_model(model.fingerprint).spec == model.spec
    with pytest.raises(kvstow.NotFoundError):
        client.get_model(b"\1" * 32)


@pytest.mark.parametrize(
    "groups, field",
    [
        ([(0, 2, "full", 2, 64, 64), (3, 1, "full", 2, 64, 64)], "groups"),
        ([(0, 2, "full", 0, 64, 64)], "heads"),
        ([(0, 2, "full", 2, 0, 64)], "k_dim"),
        ([(0, 2, "fulll", 2, 64, 64)], "full"),
    ],
)
def test_u06_bad_layouts_are_refused_with_the_fields_name(client, groups, field):
    spec = kvstow.ModelSpec("m", "w", [kvstow.LayerGroup(*group) for group in groups])
    with pytest.raises(kvstow.InvalidArgumentError, match=field):
        client.register_model(spec)


def test_u06_groups_of_unlike_heads_and_latents_round_trip(client):
    rng = numpy.random.default_rng(6)
    groups = [
        kvstow.LayerGroup(0, 1, "full", 2, 64, 32),
        kvstow.LayerGroup(1, 2, "sliding", 5, 48, 48),
        kvstow.LayerGroup(3, 1, "mla", 1, 576, 0),
    ]
    model = client.register_model(kvstow.ModelSpec("hybrid", "w", groups, tokens_per_block=32))
    layers, empty = [], []
    for heads, k_dim, v_dim in model.layer_shapes:
        arrays = [
            rng.integers(0, 2**16, (70, heads, dim), "u2") if dim else None
            for dim in (k_dim, v_dim)
        ]
        layers.append(tuple(arrays))
        empty.append(tuple(None if a is None else numpy.zeros_like(a) for a in arrays))
    put = client.put(model, range(70), layers, codec="safe")
    assert put.num_stored == 2 and put.num_leftover_tokens == 6
    # Random bits are NaN here and there: such planes stay raw, and the first block does anyway.
    client.get(model, put.keys, empty)
    for got, want in zip(empty, layers):
        for a, b in zip(got, want):
            assert a is None or (a[:32] == b[:32]).all()
    with pytest.raises(kvstow.InvalidArgumentError, match=r"layers\[3\].v: given"):
        client.put(model, range(70), layers[:3] + [(layers[3][0], layers[3][0])])


def test_layers_may_have_a_codec_of_their_own(client, kv):
    model = client.register_model(kv.spec)
    keys = client.put(model, kv.tokens, kv.layers, codec="k=tqm4,v=tq4,layer0=raw").keys
    back = kv.empty_layers()
    client.get(model, keys, back)
    exact = [(a == b).all() for got, want in zip(back, kv.layers) for a, b in zip(got, want)]
    assert exact == [True, True] + [False] * (len(exact) - 2)
    with pytest.raises(kvstow.InvalidArgumentError, match='plan item "layer0=tqm9"'):
        client.put(model, kv.tokens, kv.layers, codec="safe,layer0=tqm9")


def test_u07_quantized_kv_is_kept_as_it_is(client):
    spec = kvstow.ModelSpec.uniform(
        "fp8", "w", num_layers=1, num_kv_heads=2, head_dim=64, kv_dtype="f8_e4m3"
    )
    model = client.register_model(spec)
    k = numpy.arange(64 * 2 * 64, dtype="u1").reshape(64, 2, 64)
    keys = client.put(model, range(64), [(k, k)], codec="k=tq4,v=tq3").keys
    back = numpy.zeros_like(k)
    client.get(model, keys, [(back, numpy.zeros_like(k))])
    assert (back == k).all()
    assert client.stat().codecs["raw"]["num_blocks"] == 1


def test_errors_are_classes_by_code():
    for name in kvstow.__all__:
        cls = getattr(kvstow, name)
        if isinstance(cls, type) and issubclass(cls, kvstow.Error) and cls is not kvstow.Error:
            made = kvstow.errors.from_status(cls.code, "text", 1.5)
            assert type(made) is cls and str(made) == "text" and made.retry_after == 1.5
    assert issubclass(kvstow.InvalidArgumentError, ValueError)
    assert issubclass(kvstow.DeadlineExceededError, TimeoutError)
    with pytest.raises(kvstow.InvalidArgumentError, match="target"):
        kvstow.Client("nowhere")
    with pytest.raises(kvstow.InvalidArgumentError, match="data_timeout"):
        kvstow.Client("unix:/x", data_timeout=float("nan"))
    closed = kvstow.Client("unix:/nobody.sock")
    with pytest.raises(kvstow.UnavailableError, match="/nobody.sock"):
        closed.stat()
    closed.close()
    with pytest.raises(kvstow.FailedPreconditionError, match="closed"):
        closed.stat()


def test_a_full_tier_says_so_with_a_hint(tmp_path, kv):
    daemon = Daemon(tmp_path, dram="3MiB").start()
    with kvstow.Client(daemon.target) as client:
        model = client.register_model(kv.spec)
        client.put(model, kv.tokens[:128], [(k[:128], v[:128]) for k, v in kv.layers], codec="raw")
        with client.lease(client.lookup(model, kv.tokens[:128]).keys):
            put = client.put(model, kv.tokens, kv.layers, codec="raw")
            assert put.num_refused > 0
            assert isinstance(put.first_refusal, kvstow.ResourceExhaustedError)
    daemon.kill()


def test_two_clients_see_each_others_blocks(daemon, kv):
    with kvstow.Client(daemon.target) as one, kvstow.Client(daemon.target) as two:
        keys = one.put(one.register_model(kv.spec), kv.tokens, kv.layers, codec="raw").keys
        got_layers = kv.empty_layers()
        assert two.get(kvstow.Model(kv.spec), keys, got_layers).num_leading == 4
        assert same(got_layers, kv.layers)


def test_the_rate_beside_the_cpp_clients(tmp_path, capsys):
    daemon = Daemon(tmp_path, dram="700MiB").start()
    bench = subprocess.run(
        [CLI, "bench", "--path", "shm", "--target", daemon.target, "--total", "64MiB"]
        + ["--size", "4MiB", "--blocks-per-call", "16", "--rounds", "3", "--json"],
        capture_output=True,
        text=True,
    )
    assert bench.returncode == 0, bench.stderr
    cpp = {}
    for line in bench.stdout.splitlines():
        row = json.loads(line)
        if "case" in row:
            cpp[row["case"]] = row["gb_per_s"]
    program = (
        "import sys; sys.path.insert(0, 'tests/python'); import conftest, kvstow, numpy, time\n"
        "kvstow.tune_malloc()\n"
        "spec = kvstow.ModelSpec.uniform('b', 'w', num_layers=16, num_kv_heads=8, head_dim=128)\n"
        f"client = kvstow.Client({daemon.target!r})\n"
        "model = client.register_model(spec)\n"
        "rng = numpy.random.default_rng(1)\n"
        "make = lambda f: [(f(), f()) for _ in range(16)]\n"
        "shape = (8, 16 * 64, 128)\n"  # head-major, as bench has it
        "layers = make(lambda: rng.integers(0, 65536, shape, 'u2').transpose(1, 0, 2))\n"
        "back = make(lambda: numpy.ones(shape, 'u2').transpose(1, 0, 2))\n"
        "gb, rates = sum(a.nbytes for pair in layers for a in pair) / 1e9, []\n"
        "for i in range(4):\n"
        "    t0 = time.perf_counter()\n"
        "    put = client.put(model, range(16 * 64), layers, codec='raw', tenant=str(i))\n"
        "    t1 = time.perf_counter()\n"
        "    got = client.get(model, put.keys, back)\n"
        "    t2 = time.perf_counter()\n"
        "    assert put.num_stored == got.num_leading == 16\n"
        "    client.delete(put.keys)\n"
        "    rates.append((gb / (t1 - t0), gb / (t2 - t1)))\n"
        "print(*[sorted(r[i] for r in rates[1:])[1] for i in (0, 1)])\n"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    put, get = map(float, run.stdout.split())
    with capsys.disabled():
        print(
            f"\nrate of Python as a share of C++: put {put / cpp['shm/copy/put']:.2f}, "
            f"get {get / cpp['shm/copy/get']:.2f}"
        )
    assert put > 0.2 * cpp["shm/copy/put"] and get > 0.2 * cpp["shm/copy/get"]
    daemon.kill()
