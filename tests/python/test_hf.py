"""kvstow.hf: a DynamicCache there and back."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import kvstow  # noqa: E402
import kvstow.hf  # noqa: E402


class Cache:
    """What kvstow.hf uses of transformers' DynamicCache."""

    def __init__(self):
        self.layers = []

    def update(self, k, v, layer_idx):
        assert layer_idx == len(self.layers)
        self.layers.append(SimpleNamespace(keys=k, values=v, is_sliding=False))


class Config(SimpleNamespace):
    def to_dict(self):
        return dict(self.__dict__)


def config(**changes):
    return Config(
        architectures=["M"],
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        hidden_size=64,
        rope_theta=1e4,
        **changes,
    )


def filled(num_tokens, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    cache = Cache()
    for i in range(3):
        cache.update(
            torch.randn(1, 2, num_tokens, 16, generator=generator).to(dtype),
            torch.randn(1, 2, num_tokens, 16, generator=generator).to(dtype),
            i,
        )
    return cache


def store_of(client, **options):
    options = {"config": config(), "weights": "w", "dtype": "bf16", "codec": "lossless", **options}
    return kvstow.hf.CacheStore(client, **options)


def test_round_trip(client):
    ids = torch.arange(300)[None]
    cache = filled(200)
    put = store_of(client).save(ids, cache)
    assert put.num_stored == 3 and put.num_leftover_tokens == 8
    back, num_tokens = store_of(client).load(ids, Cache())
    assert num_tokens == 192
    for got, want in zip(back.layers, cache.layers):
        assert got.keys.shape == (1, 2, 192, 16)
        assert torch.equal(got.keys, want.keys[:, :, :192])
        assert torch.equal(got.values, want.values[:, :, :192])
    # The last token is left to the model.
    assert store_of(client).load(ids[:, :192], Cache())[1] == 128
    assert store_of(client).load(ids[:, :64], Cache())[1] == 0
    other = ids.clone()
    other[0, 70] = 5
    assert store_of(client).load(other, Cache())[1] == 64


@pytest.mark.parametrize(
    "change",
    [
        {"weights": "w2"},
        {"dtype": "f16"},
        {"config": config(rope_scaling={"factor": 2})},
        {"tenant": "t"},
        {"lora_digest": b"1" * 32},
        {"tokens_per_block": 32},
    ],
)
def test_anything_else_misses(client, change):
    ids = torch.arange(300)
    store_of(client).save(ids, filled(200))
    assert store_of(client, **change).load(ids, Cache())[1] == 0
    assert store_of(client).load(ids, Cache())[1] == 192


def test_without_a_service_there_is_no_error():
    with kvstow.Client("unix:/nobody.sock") as client:
        store = store_of(client)
        assert store.load(torch.arange(300), Cache())[1] == 0
        assert store.save(torch.arange(300), filled(200)) is None


def test_what_is_refused(client):
    store = store_of(client)
    ids = torch.arange(300)
    with pytest.raises(kvstow.InvalidArgumentError, match="batch of 2"):
        store.load(ids.repeat(2, 1), Cache())
    sliding = filled(100)
    sliding.layers[1].is_sliding = True
    with pytest.raises(kvstow.InvalidArgumentError, match=r"layers\[1\]"):
        store.save(ids, sliding)
    with pytest.raises(kvstow.InvalidArgumentError, match="want f32|want bf16"):
        store.save(ids, filled(100, torch.float32))
    with pytest.raises(kvstow.InvalidArgumentError, match="layer 1 is 'mamba'"):
        store_of(client, config=config(layer_types=["full_attention", "mamba", "full_attention"]))
    with pytest.raises(kvstow.InvalidArgumentError, match="give a model"):
        kvstow.hf.CacheStore(client, config=config())


def test_with_transformers(client):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(1)
    tiny = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = transformers.LlamaForCausalLM(tiny).eval()
    ids = torch.randint(0, 300, (1, 200))
    options = dict(max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
    first = model.generate(ids, **options)
    store = kvstow.hf.CacheStore(client, model, codec="lossless")
    assert store.save(first.sequences, first.past_key_values).num_stored == 3
    cache, num_tokens = kvstow.hf.CacheStore(client, model, codec="lossless").load(ids)
    assert num_tokens == 192
    second = model.generate(ids, past_key_values=cache, **options)
    assert torch.equal(first.sequences, second.sequences)
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 1
    assert kvstow.hf.CacheStore(client, model).load(ids)[1] == 0
