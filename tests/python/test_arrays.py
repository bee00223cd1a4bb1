"""What the client accepts as an array, and how it names what it does not."""

import ctypes

import numpy
import pytest

import kvstow

TOKENS, HEADS, DIM = 64, 2, 64


@pytest.fixture
def model(client):
    return client.register_model(
        kvstow.ModelSpec.uniform(
            "arrays", "w", num_layers=1, num_kv_heads=HEADS, head_dim=DIM, kv_dtype="f32"
        )
    )


def rows(seed=0, shape=(TOKENS, HEADS, DIM)):
    return numpy.random.default_rng(seed).standard_normal(shape, "f4")


def round_trip(client, model, k, v, back):
    keys = client.put(model, range(TOKENS), [(k, v)], codec="raw").keys
    assert client.get(model, keys, [back]).num_leading == 1


class DlpackOnly:
    """An array that can do nothing but DLPack."""

    def __init__(self, array, device=(1, 0)):
        self._array = array
        self._device = device

    def __dlpack_device__(self):
        return self._device

    def __dlpack__(self, **_):
        return self._array.__dlpack__()


def test_any_strides_do_as_long_as_rows_are_contiguous(client, model):
    head_major = rows(1, (HEADS, TOKENS, DIM)).transpose(1, 0, 2)
    padded = rows(2, (2 * TOKENS, HEADS + 1, 2 * DIM))[::2, :HEADS, DIM:]
    back_k = numpy.zeros((HEADS, TOKENS + 5, DIM), "f4").transpose(1, 0, 2)
    back_v = numpy.zeros((TOKENS, HEADS, 3 * DIM), "f4")[:, :, DIM : 2 * DIM]
    round_trip(client, model, head_major, padded, (back_k, back_v))
    assert (back_k[:TOKENS] == head_major).all() and (back_v == padded).all()
    assert not back_k[TOKENS:].any() and not back_v.base[:, :, :DIM].any()


def test_buffers_and_dlpack_alike(client, model):
    k, v = rows(1), rows(2)
    back_k = numpy.zeros((TOKENS, HEADS, DIM), "f4")
    back_v = memoryview(bytearray(v.nbytes)).cast("f", (TOKENS, HEADS, DIM))
    round_trip(client, model, DlpackOnly(k), memoryview(v), (DlpackOnly(back_k), back_v))
    assert (back_k == k).all() and bytes(back_v) == v.tobytes()
    bits = numpy.zeros((TOKENS, HEADS, DIM), "u4")
    keys = kvstow.block_keys(model, range(TOKENS))
    client.get(model, keys, [(bits, numpy.zeros_like(bits))])
    assert (bits == k.view("u4")).all()


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


class Bf16Tensor:
    """A bf16 tensor, as torch hands it over: DLPack type 4, C order without strides, an offset."""

    deleted = 0

    def __init__(self, bits):
        self._padded = numpy.zeros(bits.size + 8, "u2")
        self.bits = self._padded[8:].reshape(bits.shape)
        self.bits[:] = bits

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, **_):
        shape = (ctypes.c_int64 * 3)(*self.bits.shape)
        tensor = DLTensor(self._padded.ctypes.data, 1, 0, 3, 4, 16, 1, shape, None, 16, None)

        @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        def delete(_):
            Bf16Tensor.deleted += 1

        tensor.deleter = ctypes.cast(delete, ctypes.c_void_p).value
        self._alive = getattr(self, "_alive", []) + [(tensor, shape, delete)]
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (
            ctypes.c_void_p,
            ctypes.c_char_p,
            ctypes.c_void_p,
        )
        return new(ctypes.addressof(tensor), b"dltensor", None)


def test_bf16_by_dlpack_and_as_uint16(client, kv):
    model = client.register_model(kv.spec)
    layers = [(Bf16Tensor(k), Bf16Tensor(v)) for k, v in kv.layers]
    keys = client.put(model, kv.tokens, layers, codec="raw").keys
    assert Bf16Tensor.deleted == 60  # each was given back, once
    back = [(Bf16Tensor(numpy.zeros_like(k)), numpy.zeros_like(v)) for k, v in kv.layers]
    client.get(model, keys, back)
    assert all((b.bits == k).all() and (c == v).all() for (b, c), (k, v) in zip(back, kv.layers))


def test_torch_tensors(client, kv):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    model = client.register_model(kv.spec)

    def tensor(bits):
        return torch.from_numpy(bits.astype("i2")).view(torch.bfloat16)

    layers = [(tensor(k), tensor(v)) for k, v in kv.layers]
    keys = client.put(model, torch.tensor(kv.tokens.copy()), layers, codec="raw").keys
    back = [
        (
            torch.zeros(256, 3, 64, dtype=torch.bfloat16),
            torch.zeros(3, 256, 64, dtype=torch.int16).transpose(0, 1),
        )
        for _ in layers
    ]
    assert client.get(model, keys, back).num_leading == 4
    for (k, v), (want_k, want_v) in zip(back, layers):
        assert torch.equal(k.view(torch.int16), want_k.view(torch.int16))
        assert torch.equal(v, want_v.view(torch.int16))
    grad = torch.zeros(256, 3, 64, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(kvstow.InvalidArgumentError, match=r"layers\[0\].k: DLPack refused"):
        client.put(model, kv.tokens, [(grad, grad)] * 30, tenant="t")
    freed = torch.zeros(256, 3, 64, dtype=torch.bfloat16)
    freed.untyped_storage().resize_(0)
    with pytest.raises(kvstow.InvalidArgumentError, match=r"layers\[0\].k"):
        client.put(model, kv.tokens, [(freed, freed)] * 30, tenant="t")


def read_only(array):
    array.flags.writeable = False
    return array


BAD = {
    "two dimensions": (lambda: rows()[:, 0], "shape"),
    "other heads": (lambda: rows(shape=(TOKENS, HEADS + 1, DIM)), r"shape \[64, 3, 64\]"),
    "other dim": (lambda: rows(shape=(TOKENS, HEADS, DIM - 1)), "shape"),
    "too few tokens": (lambda: rows(shape=(TOKENS - 1, HEADS, DIM)), r"\[63, 2, 64\], want f32"),
    "other width": (lambda: rows().astype("f2"), "float16, want f32"),
    "doubles": (lambda: rows().astype("f8"), "float64, want f32"),
    "big-endian": (lambda: rows().astype(">f4"), "big-endian"),
    "complex": (lambda: numpy.zeros((TOKENS, HEADS, DIM), "c8"), "unknown kind"),
    "rows with gaps": (lambda: rows(shape=(TOKENS, HEADS, 2 * DIM))[:, :, ::2], "8 bytes apart"),
    "values before tokens": (lambda: rows(shape=(DIM, HEADS, TOKENS)).T, "bytes apart"),
    "backwards": (lambda: rows()[::-1], "strides of -512"),
    "repeated": (
        lambda: numpy.broadcast_to(rows(shape=(1, HEADS, DIM)), (TOKENS, HEADS, DIM)),
        "strides of 0",
    ),
    "a list": (lambda: rows().tolist(), "list, want an array"),
    "nothing": (lambda: None, "None, want the values|NoneType"),
    "on a device": (lambda: DlpackOnly(rows(), (2, 0)), "device type 2"),
    "a bytes object": (lambda: rows().tobytes(), "shape"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("role", ["k", "v"])
def test_bad_arrays_are_named(client, model, case, role):
    make, match = BAD[case]
    pair = (make(), rows()) if role == "k" else (rows(), make())
    with pytest.raises(kvstow.InvalidArgumentError, match=rf"layers\[0\]\.{role}: .*({match})"):
        client.put(model, range(TOKENS), [pair])
    assert client.stat().open_tickets == 0
    with pytest.raises(kvstow.InvalidArgumentError, match=rf"layers\[0\]\.{role}: "):
        client.get(model, [b"\1" * 32], [pair])


def test_destinations_must_be_writable_and_not_overlap(client, model):
    keys = client.put(model, range(TOKENS), [(rows(1), rows(2))], codec="raw").keys
    good = numpy.zeros((TOKENS, HEADS, DIM), "f4")
    with pytest.raises(kvstow.InvalidArgumentError, match=r"layers\[0\].v: .*can be written"):
        client.get(model, keys, [(good, read_only(rows()))])
    with pytest.raises(kvstow.InvalidArgumentError, match="can be written"):
        client.get(
            model, keys, [(memoryview(rows().tobytes()).cast("f", (TOKENS, HEADS, DIM)), good)]
        )
    row = DIM * 4
    overlapping = numpy.lib.stride_tricks.as_strided(
        numpy.zeros(4 * TOKENS * DIM, "f4"), (TOKENS, HEADS, DIM), (row, row, 4)
    )
    with pytest.raises(kvstow.InvalidArgumentError, match="overlap"):
        client.get(model, keys, [(overlapping, good)])
    assert not good.any()


def test_layers_must_be_pairs_and_as_many_as_the_model_has(client, model):
    for layers, match in [
        ([], "layers: 0, want 1"),
        ([(rows(), rows())] * 2, "layers: 2, want 1"),
        ([rows()], r"layers\[0\]: numpy.ndarray, want a pair"),
        ([(rows(),)], r"layers\[0\]: 1 arrays"),
        (7, "layers: want a sequence"),
    ]:
        with pytest.raises(kvstow.InvalidArgumentError, match=match):
            client.put(model, range(TOKENS), layers)
    with pytest.raises(kvstow.InvalidArgumentError, match="codec"):
        client.put(model, range(TOKENS), [(rows(), rows())], codec="k=tq5")
    with pytest.raises(kvstow.InvalidArgumentError, match="63 tokens, want at least one block"):
        client.put(model, range(63), [(rows(), rows())])
    with pytest.raises(TypeError, match="'codecs'"):
        client.put(model, range(TOKENS), [(rows(), rows())], codecs="raw")
    with pytest.raises(kvstow.InvalidArgumentError, match=r"keys\[1\]"):
        client.delete([b"\0" * 32, "zz"])


def test_arrays_are_held_while_a_session_has_them_and_no_longer(client, model):
    k = bytearray(rows(1).tobytes())
    view = memoryview(k).cast("f", (TOKENS, HEADS, DIM))
    with client.put_session(model, range(TOKENS), codec="raw") as session:
        session.put_layer(0, view, rows(2))
        view.release()
        k.clear()  # raises BufferError while anyone holds the memory
    assert session.result.num_stored == 1
    with pytest.raises(kvstow.InvalidArgumentError, match="released"):
        client.put(model, range(TOKENS), [(view, view)], tenant="t")
