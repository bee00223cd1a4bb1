"""kvstow.eval on a model of random weights: what it measures, and that it would notice."""

import json
import math

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from kvstow.codecs import PlaneCodec  # noqa: E402
from kvstow.eval import Choice, LanguageModel, Scores, read_back, score_texts  # noqa: E402
from kvstow.eval import __main__ as command  # noqa: E402
from kvstow.eval import gates, likelihood, retrieval  # noqa: E402
from kvstow.eval import past as past_module  # noqa: E402
from kvstow.eval.choices import identity  # noqa: E402

WORDS = 97


def tokenizer(text, add_special_tokens=True):
    return {"input_ids": [ord(c) % WORDS for c in text]}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.3,  # attention that is not flat
    )
    return LanguageModel(transformers.LlamaForCausalLM(config), tokenizer)


def text_of(num_tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return likelihood.Text(
        f"text{seed}", torch.randint(WORDS, (num_tokens,), generator=generator).tolist()
    )


def kl_of(model, words, **options):
    scores = score_texts(
        model, [text_of(300)], [Choice.parse(word) for word in words],
        histories=[256], num_scored=30, **options,
    )
    return [scores[word]["text0"].mean_kl().value for word in words]


def test_prefill_in_pieces_is_the_past_of_one_forward_pass(model):
    ids = text_of(600).ids
    past = model.prefill(ids)
    with torch.inference_mode():
        cache = transformers.DynamicCache()
        logits = model.network(input_ids=torch.tensor([ids]), past_key_values=cache).logits[0]
    assert past.num_tokens == 600 and (past.num_layers, past.dim) == (3, 16)
    for (k, v), layer in zip(past.layers, cache.layers):
        torch.testing.assert_close(k, layer.keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(v, layer.values, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        model.log_probs(past.first(500), ids[500:]),
        torch.log_softmax(logits[500:], -1),
        rtol=1e-3,
        atol=1e-3,
    )


def test_lossless_is_exactly_zero_and_fewer_bits_cost_more(model):
    raw, int8, tq4, tq2 = kl_of(model, ["lossless", "int8", "tq4", "tq2"])
    assert raw == 0
    assert 0 < int8 < tq4 < tq2


def test_read_back_changes_the_blocks_between_the_raw_ends_and_no_other(model):
    past = model.prefill(text_of(300).ids)
    back = read_back(past, Choice.parse("k=tqm2,v=tq2,layer1.v=raw"))
    for layer, (pair, exact) in enumerate(zip(back.layers, past.layers)):
        for role, rows, want in zip("kv", pair, exact):
            differs = (rows != want).any(-1)[0]  # [heads, tokens]
            assert not differs[:, :64].any() and not differs[:, 192:].any()
            assert differs[:, 64:192].all() == ((role, layer) != ("v", 1))
    # The exact past is left alone: it is read again for the next choice.
    assert (model.prefill(text_of(300).ids).layers[0][0] == past.layers[0][0]).all()


def test_a_calibrated_codec_turns_each_head_by_its_own_rotation(model, monkeypatch):
    class Bundle:
        def rotation(self, layer, role, head):
            # Head 1 of layer 2 keeps its place, all others are mirrored.
            return identity(16) * (1 if (layer, head) == (2, 1) else -1)

    asked = []
    real = past_module._cached_codec
    monkeypatch.setattr(past_module, "_cached_bundle", lambda path: Bundle())
    monkeypatch.setattr(
        past_module, "_cached_codec", lambda *args: asked.append(args) or real(*args)
    )
    past = model.prefill(text_of(200).ids)
    back = read_back(past, Choice.parse("olm4,calibration=some.bundle,last=0"))
    assert {args[-1] for args in asked} == {("some.bundle", i, h) for i in range(3) for h in (0, 1)}
    keys, exact = back.layers[2][0], past.layers[2][0]
    view = exact[0, 1:2, 64:192].transpose(0, 1)
    codec = PlaneCodec("olm4", "k", 16, dtype="f32", rotation=identity(16))
    assert (keys[0, 1:2, 64:192].transpose(0, 1) == codec.read_back(view)).all()
    with pytest.raises(likelihood.InvalidArgumentError, match="want calibration=FILE"):
        read_back(past, Choice.parse("olm4"))


def test_scores_agree_with_a_case_by_hand():
    scores = Scores()
    exact = torch.log(torch.tensor([[0.75, 0.25], [0.5, 0.5]]))
    other = torch.log(torch.tensor([[0.5, 0.5], [0.25, 0.75]]))
    scores.add(exact, other, [0, 1])
    kl = [0.75 * math.log(1.5) + 0.25 * math.log(0.5), 0.5 * math.log(2) + 0.5 * math.log(2 / 3)]
    assert scores.kl == pytest.approx(kl, abs=1e-6)
    # ln(.75 / .5) and ln(.5 / .75): no change in the mean, and an error of that size.
    change = scores.perplexity_change()
    assert change.value == pytest.approx(0, abs=1e-6)
    assert change.error == pytest.approx(math.log(1.5), abs=1e-6)
    assert scores.perplexity() == pytest.approx(math.sqrt(1 / 0.75 / 0.5), abs=1e-6)
    assert scores.same_first() == 0.5


def test_a_short_text_is_named_with_what_it_lacks(model):
    message = "text0: 100 tokens, want at least 287"
    with pytest.raises(likelihood.InvalidArgumentError, match=message):
        score_texts(model, [text_of(100)], [Choice.parse("tq4")], histories=[256], num_scored=30)


def test_needles_are_hidden_at_nine_depths_of_the_wanted_length(model):
    text = text_of(5000)
    haystack = retrieval.hide(model, text, 1024, seed=3)
    assert len(haystack.ids) == 1024
    places = []
    for needle in haystack.needles:
        ids = tokenizer(needle.question + needle.answer)["input_ids"]
        places += [i for i in range(1024) if haystack.ids[i : i + len(ids)] == ids]
    assert len(places) == retrieval.NEEDLES_PER_TEXT and places == sorted(places)
    gaps = [b - a for a, b in zip(places, places[1:])]
    assert max(gaps) - min(gaps) < 20


class Copyist(LanguageModel):
    """Knows the answer to every question, but for those about one place."""

    def __init__(self, forgets):
        self.tokenizer = tokenizer
        self.forgets = forgets

    def log_probs(self, past, ids):
        answers = torch.zeros(len(ids), WORDS)
        whole = next(
            tokenizer(needle.question + needle.answer)["input_ids"]
            for needle in past
            if tokenizer(needle.question)["input_ids"] == ids[: len(needle.question)]
        )
        for i, token in enumerate(whole[1:]):
            answers[i, token] = 1
        if ids[: len(whole)] == whole[:-1] and self.forgets in "".join(map(chr, ids)):
            answers[-1] = 0
        return answers


def test_a_needle_counts_when_every_token_of_its_answer_is_found():
    hidden = retrieval.needles(0)
    haystack = retrieval.Haystack([], hidden)
    assert retrieval._count(Copyist("nowhere"), hidden, haystack) == 9
    one = "".join(chr(c) for c in tokenizer("Oslo")["input_ids"])
    assert retrieval._count(Copyist(one), hidden, haystack) == 8


def test_agreement_ends_at_the_first_other_token(model):
    text = text_of(400, seed=5)
    words = ["lossless", "int8", "tq2"]
    lengths = retrieval.agreement(
        model, [text], [Choice.parse(word) for word in words], history=320, num_tokens=40
    )
    assert lengths["lossless"] == [40]
    past = read_back(model.prefill(text.ids[:320]), Choice.parse("tq2"))
    free = model.continue_greedily(past, text.ids[320], 40)
    exact = model.continue_greedily(model.prefill(text.ids[:320]), text.ids[320], 40)
    same = [a == b for a, b in zip(free[1:], exact[1:])]
    assert lengths["tq2"] == [same.index(False) if False in same else 40]


def test_bands():
    scores = Scores([1.0, 1.0], [1.0, 1.0], [0.0, 0.0], [True, True])
    assert gates.broken_bands("lossless", scores) == []
    scores.kl[0] = 1e-9
    assert "lossless: KL" in gates.broken_bands("lossless", scores)[0]
    assert gates.broken_bands("safe", scores) == []
    scores.nll[0] = 1.02  # 1 % in the mean
    assert "perplexity +1" in gates.broken_bands("safe", scores)[0]
    scores.kl[0] = math.nan
    assert any("KL nan" in line for line in gates.broken_bands("small", scores))


@pytest.fixture
def call(model, tmp_path, monkeypatch):
    monkeypatch.setattr(LanguageModel, "load", staticmethod(lambda *_: model))
    for i in range(2):
        letters = (chr(32 + word % 90) for word in text_of(400, seed=i).ids)
        (tmp_path / f"doc{i}.txt").write_text("".join(letters))
    docs = [str(tmp_path / f"doc{i}.txt") for i in range(2)]

    def run(*arguments):
        small = ["--histories", "256", "--scored", "40", "--json", str(tmp_path / "out.json")]
        return command.main(["model", "--docs", *docs, *small, *arguments])

    return run


def test_the_command_writes_a_table_json_and_a_page(call, tmp_path, capsys):
    page = tmp_path / "out.html"
    choices = ["k=tqm3,v=tq2,layer0.k=tqm4", "lossless"]
    assert call("--codecs", *choices, "--html", str(page), "--needles", "1", "--write", "20") == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert [row["codecs"] for row in result["rows"]] == choices
    first, second = result["rows"]
    assert first["scored_tokens"] == 80 and first["kl"] > 0 and second["kl"] == 0
    assert set(first["texts"]) == {"doc0", "doc1"}
    assert second["needles_found"] == result["needles_found_exact"]
    assert second["agreement"] == [20, 20]
    assert "k=tqm3,v=tq2,layer0.k=tqm4" in capsys.readouterr().out
    html = page.read_text()
    assert "<svg" in html and "doc1" in html and "src=" not in html and "http" not in html


def test_a_broken_gate_is_exit_status_one(call, capsys, monkeypatch):
    assert call("--gate", "lossless") == 0
    monkeypatch.setitem(gates.BANDS, "safe", gates.Band(1e-12, None))
    assert call("--gate", "lossless", "safe") == 1
    assert "gate broken: safe: KL" in capsys.readouterr().err


def test_a_wrong_choice_is_exit_status_two(call, capsys):
    assert call("--codecs", "k=tq4,v=tqm4") == 2
    assert "serves keys only" in capsys.readouterr().err
