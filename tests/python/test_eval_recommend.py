"""kvstow.eval.recommend: plans from measured costs. No model: costs and answers are given."""

import sys

import pytest

import kvstow
from kvstow.eval import recommend
from kvstow.eval.choices import Choice
from kvstow.eval.recommend import CostTable, least_bits_within

NUM_LAYERS = 3


def table_of(costs=None, dim=128):
    """Keys of layer 1 cost a hundred times as much as anything else, unless said."""
    measured = {}
    for layer in range(NUM_LAYERS):
        heavy = 1.0 if layer == 1 else 0.01
        measured["k", layer, "tq2"] = heavy * (0.5 if layer == 2 else 2)
        measured["k", layer, "tqm2"] = heavy
        measured["v", layer, "tq2"] = 0.01
    measured.update(costs or {})
    return CostTable(measured, dim, 64)


def bits_of(plan, num_layers=NUM_LAYERS, dim=128):
    return Choice.parse(",".join([plan.pair(), *plan.lines()])).bits_per_value(num_layers, dim)


def test_at_the_least_bits_each_key_has_the_better_of_both_kinds_of_its_size():
    # At head dim 64 and blocks of 64 tokens tqm2 is larger than tq2 by the block's mean.
    table = table_of()
    plan = table.plan(table.least_bits())
    assert {codec for codec in plan.codecs.values()} == {"tq2"}
    assert plan.bits == pytest.approx(table.least_bits()) == pytest.approx(2.125)


def test_bits_go_first_to_where_they_gain_most():
    table = table_of()
    plan = table.plan(table.least_bits() + 0.05)
    changed = [place for place, codec in plan.codecs.items() if codec != "tq2"]
    assert changed == [("k", 1)]
    more = table.plan(3.5)
    assert more.kl < plan.kl
    assert more.codecs["k", 1] not in ("tq2", "tqm2", "tq3", "tqm3")


@pytest.mark.parametrize("budget", [2.2, 2.5, 3.0, 4.0, 6.0, 9.0, 16.0])
def test_a_plan_keeps_its_budget_and_says_its_size_as_eval_counts_it(budget):
    plan = table_of().plan(budget)
    assert plan.bits <= budget + 1e-9
    assert bits_of(plan) == pytest.approx(plan.bits)


def test_all_bits_are_the_exact_past():
    plan = table_of().plan(16)
    assert set(plan.codecs.values()) == {"raw"} and plan.kl == 0 and plan.lines() == []


def test_a_budget_below_the_smallest_plan_is_refused_with_the_least():
    with pytest.raises(kvstow.InvalidArgumentError, match="--budget is 1.5 .* least here is 2.125"):
        table_of().plan(1.5)


def test_the_least_bits_within_a_limit_are_found_and_were_measured():
    table, asked = table_of(), []

    def change_of(plan):
        asked.append(plan.bits)
        return plan.kl / 10, 0.001

    plan = least_bits_within(table, 0.01, change_of)
    assert plan.bits in asked
    assert plan.kl / 10 + 0.001 <= 0.01
    smaller = [bits for bits in asked if bits < plan.bits]
    assert smaller and max(smaller) >= plan.bits - 0.5
    assert len(asked) <= 8


def test_an_error_of_the_measure_counts_against_a_plan():
    def loose(plan):
        return plan.kl / 10, 0.0

    def unsure(plan):
        return plan.kl / 10, 0.008

    table = table_of()
    assert least_bits_within(table, 0.01, unsure).bits > least_bits_within(table, 0.01, loose).bits


def test_where_nothing_is_within_the_limit_there_is_no_plan():
    assert least_bits_within(table_of(), 0.01, lambda plan: (0.0, 0.02)) is None


def test_what_needs_more_than_four_bits_more_is_found_too():
    def change_of(plan):
        return (0.0 if plan.bits >= 12 else 1.0), 0.0

    assert 12 <= least_bits_within(table_of(), 0.01, change_of).bits <= 13.5


def test_without_torch_the_command_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)  # as where it is not installed
    text = tmp_path / "text.txt"
    text.write_text("words")
    assert recommend.main(["model", "--docs", str(text), "--max-ppl", "1%"]) == 2
    assert "pip install 'kvstow[eval]'" in capsys.readouterr().err
