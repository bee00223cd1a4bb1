"""kvstow.eval.choices: what a word of --codecs means."""

import pytest

import kvstow
from kvstow.eval.choices import Choice


def test_a_preset_brings_the_blocks_that_it_keeps_raw():
    tiny = Choice.parse("tiny", first=0, last=0)
    assert (tiny.k, tiny.v) == ("tqm3", "tq2")
    assert tiny.encoded_tokens(1024) == (64, 960)
    assert Choice.parse("safe").encoded_tokens(1024) == (64, 1024)
    assert Choice.parse("lossless").encoded_tokens(1024) == (0, 1024)


def test_other_words_take_the_ends_they_are_given():
    assert Choice.parse("tq4").encoded_tokens(1024) == (64, 960)
    assert Choice.parse("tq4", first=0, last=128).encoded_tokens(1024) == (0, 896)
    assert Choice.parse("k=tqm4,v=tq4,first=0,last=65").encoded_tokens(1024) == (0, 896)
    assert Choice.parse("tq4,block=128").encoded_tokens(1024) == (64, 960)


def test_the_tail_below_a_block_and_short_pasts_stay_raw():
    assert Choice.parse("tq4,first=0,last=0").encoded_tokens(100) == (0, 64)
    # As in the store: the tail, and the last full block before it.
    assert Choice.parse("tiny").encoded_tokens(1063) == (64, 960)
    for num_tokens in (100, 10):
        begin, end = Choice.parse("tq4").encoded_tokens(num_tokens)
        assert begin == end


def test_layers_override():
    choice = Choice.parse("k=tqm3,v=tq2,layer0.k=tqm4,layer1.v=tq3,layer2.v=tq4")
    assert [choice.codec("k", layer) for layer in range(3)] == ["tqm4", "tqm3", "tqm3"]
    assert [choice.codec("v", layer) for layer in range(3)] == ["tq2", "tq3", "tq4"]


def test_a_plan_file_says_layers_and_the_word_has_the_last_say(tmp_path):
    plan = tmp_path / "plan.txt"
    plan.write_text("# measured\nlayer0-1.k=tqm4, layer1.v=tq3\n\nlayer2.k=raw  # biased\n")
    choice = Choice.parse(f"k=tqm3,v=tq2,plan={plan},layer1.k=tqm2")
    assert [choice.codec("k", layer) for layer in range(4)] == ["tqm4", "tqm2", "raw", "tqm3"]
    assert [choice.codec("v", layer) for layer in range(3)] == ["tq2", "tq3", "tq2"]
    plan.write_text("safe\n")
    with pytest.raises(kvstow.InvalidArgumentError, match="'safe' is no layer"):
        Choice.parse(f"k=tqm3,v=tq2,plan={plan}")


def test_bits_are_the_mean_over_planes_as_stored():
    assert Choice.parse("tq4").bits_per_value(30, 128) == 4.125
    assert Choice.parse("k=tq4,v=tq2").bits_per_value(30, 128) == 3.125
    assert Choice.parse("k=tq4,v=tq2,layer0.v=tq4").bits_per_value(2, 128) == (3 * 4.125 + 2.125) / 4
    # 14 of 16 blocks are encoded.
    assert Choice.parse("tq4").bits_of_all(30, 128, 1024) == (14 * 4.125 + 2 * 16) / 16


def test_a_bundle_is_named_and_costs_no_bits_of_a_plane():
    choice = Choice.parse("olm4,calibration=model.bundle,first=0")
    assert choice.calibration == "model.bundle" and choice.num_raw_first_tokens == 0
    assert choice.bits_per_value(30, 128) == Choice.parse("tq4").bits_per_value(30, 128)


@pytest.mark.parametrize(
    "text, message",
    [
        ("saef", "saef"),
        ("k=tq4", "no codec for both"),
        ("k=tq4,v=tqm4", "serves keys only"),
        ("k=tqm3,v=tq2,layer3.v=tqm2", "keys"),
        ("k=tqm3,v=tq2,q0=tq4", "'q0=tq4' is not understood"),
        ("tq4,last=some", "'last=some' is not understood"),
    ],
)
def test_what_is_not_understood_is_named(text, message):
    with pytest.raises(kvstow.InvalidArgumentError, match=message):
        Choice.parse(text)
