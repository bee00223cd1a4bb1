"""kvstow.codecs: the codecs on arrays, without a service."""

import subprocess

import numpy
import pytest
from conftest import CLI, ROOT

import kvstow
from kvstow.codecs import Bundle, PlaneCodec, all_codecs, codec_choice

TOKENS, HEADS, DIM = 128, 2, 64


def gaussian(seed=0, shape=(TOKENS, HEADS, DIM)):
    return numpy.random.default_rng(seed).standard_normal(shape, "f4")


def relative_error(back, rows):
    return float(((back - rows) ** 2).sum() / (rows**2).sum())


def test_read_back_is_what_a_reader_of_the_store_gets(client):
    spec = kvstow.ModelSpec.uniform(
        "codecs", "w", num_layers=1, num_kv_heads=HEADS, head_dim=DIM, kv_dtype="f32"
    )
    model = client.register_model(spec)
    k, v = gaussian(1), gaussian(2)
    keys = client.put(model, range(TOKENS), [(k, v)], codec="k=tqm3,v=tq2").keys
    got = (numpy.zeros_like(k), numpy.zeros_like(v))
    assert client.get(model, keys, [got]).num_leading == 2
    assert (PlaneCodec("tqm3", "k", DIM, dtype="f32").read_back(k) == got[0]).all()
    assert (PlaneCodec("tq2", "v", DIM, dtype="f32").read_back(v) == got[1]).all()
    assert not (got[0] == k).all()


def test_errors_of_gaussian_rows_are_those_of_theory():
    rows = gaussian(3, (2048, HEADS, DIM))
    # Lloyd-Max for long rows; the fitted scales of short ones take up to a tenth off.
    for name, energy in [("tq4", 0.00951), ("tq3", 0.0345), ("tq2", 0.1175)]:
        error = relative_error(PlaneCodec(name, "k", DIM, dtype="f32").read_back(rows), rows)
        assert 0.9 < error / energy < 1.01, (name, error)


def test_sizes_are_those_of_the_format():
    assert PlaneCodec("tq4", "v", 128).bits_per_value == 4.125
    assert PlaneCodec("int8", "k", 64).bits_per_value == 8.25
    # Means and their scale, filled up to 64 bytes.
    assert PlaneCodec("tqm2", "k", 128).plane_bytes == 64 * 2 + 144 + 64 * 32 + 48


def test_strided_rows_are_read_and_written():
    head_major = gaussian(4, (HEADS, TOKENS, DIM))
    codec = PlaneCodec("tq4", "v", DIM, dtype="f32")
    view = head_major.transpose(1, 0, 2)
    planes, kept_raw = codec.encode(view)
    assert not kept_raw.any() and planes.shape == (2, HEADS, codec.plane_bytes)
    back = numpy.zeros_like(head_major)
    codec.decode(planes, back.transpose(1, 0, 2), kept_raw)
    assert (back.transpose(1, 0, 2) == codec.read_back(numpy.ascontiguousarray(view))).all()


def test_a_plane_that_is_not_finite_is_kept_and_the_others_are_not():
    rows = gaussian(5)
    rows[70, 1, 3] = numpy.nan
    codec = PlaneCodec("tq4", "k", DIM, dtype="f32")
    _, kept_raw = codec.encode(rows)
    assert kept_raw.tolist() == [[False, False], [False, True]]
    back = codec.read_back(rows)
    assert numpy.array_equal(back[64:, 1], rows[64:, 1], equal_nan=True)
    assert not (back[64:, 0] == rows[64:, 0]).all()


def test_a_codec_that_does_not_take_such_planes_is_raw_as_in_the_store():
    assert PlaneCodec("tq4", "k", 24).name == "raw"  # no Hadamard matrix of that order
    assert PlaneCodec("tqm4", "v", DIM).name == "raw"
    assert PlaneCodec("olm4", "k", DIM).name == "raw"  # no calibration
    rows = gaussian(6)
    assert (PlaneCodec("tqm4", "v", DIM, dtype="f32").read_back(rows) == rows).all()


def test_calibrated_codecs_take_a_rotation():
    assert all_codecs()["olm4"] and not all_codecs()["tq4"]
    one = (numpy.eye(DIM) * 2**14).astype("i2")
    codec = PlaneCodec("olm4", "v", DIM, dtype="f32", rotation=one)
    rows = gaussian(7)
    assert codec.name == "olm4"
    assert 0 < relative_error(codec.read_back(rows), rows) < 0.012
    with pytest.raises(kvstow.InvalidArgumentError, match=r"rotation: .* want contiguous int16"):
        PlaneCodec("olm4", "v", DIM, rotation=one.astype("i4"))
    with pytest.raises(kvstow.InvalidArgumentError, match="orthogonal"):
        PlaneCodec("olm4", "v", DIM, rotation=numpy.ones((DIM, DIM), "i2"))


def test_a_bundle_gives_the_rotations_that_calibrate_computed(tmp_path):
    path = tmp_path / "bundle"
    samples = ROOT / "tests" / "data" / "smollm2_calibration.safetensors"
    subprocess.run([CLI, "calibrate", samples, "-o", path], check=True, capture_output=True)
    bundle = Bundle.read(path)
    one = numpy.eye(DIM) * 2**28
    for place in [(0, "k", 0), (0, "v", 2)]:
        rotation = bundle.rotation(*place).astype("i8")
        assert abs(rotation @ rotation.T - one).max() < 2**20
        codec = PlaneCodec("olm4", place[1], DIM, rotation=bundle.rotation(*place))
        assert codec.name == "olm4"
    assert (bundle.rotation(0, "k", 0) != bundle.rotation(0, "k", 1)).any()
    assert bundle.rotation(30, "k", 0) is None and bundle.rotation(0, "k", 3) is None
    assert len(bundle.id) == 64
    data = path.read_bytes()
    for bad in (data[:-1], data[:1000] + bytes([data[1000] ^ 1]) + data[1001:], b""):
        with pytest.raises(kvstow.DataLossError):
            Bundle(bad)


def test_choices():
    assert codec_choice("tiny") == ("tqm3", "tq2", True, 64)
    assert codec_choice("k=tqm4,v=tq3") == ("tqm4", "tq3", False, 0)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("tq5", "k", DIM), 'did you mean "tq'),
        (("tq4", "key", DIM), 'role: "key"'),
        (("tq4", "k", 0), "dim: 0, want 1 to"),
    ],
)
def test_bad_codecs_are_named(arguments, message):
    with pytest.raises(kvstow.InvalidArgumentError, match=message):
        PlaneCodec(*arguments)


def test_bad_arrays_are_named():
    codec = PlaneCodec("tq4", "k", DIM, dtype="f32")
    rows = gaussian(8)
    with pytest.raises(kvstow.InvalidArgumentError, match="a multiple of 64 tokens"):
        codec.encode(rows[:100])
    with pytest.raises(kvstow.InvalidArgumentError, match="rows: float64, want f32"):
        codec.encode(rows.astype("f8"))
    planes, kept_raw = codec.encode(rows)
    with pytest.raises(kvstow.InvalidArgumentError, match="planes: uint8"):
        codec.decode(planes[:, :, :-1], rows, kept_raw)
    with pytest.raises(kvstow.InvalidArgumentError, match="kept_raw: 2 planes, want 4"):
        codec.decode(planes, rows, kept_raw[:1])
