"""Short and long answers: the formula of node time and the simulator agree, or the reading says where they do not."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from lab.ablations.common.ablation import Ablation, Case, Estimated, run
from lab.ablations.decoding.answers import (
    ANSWERS,
    APART,
    LENGTHS,
    MIXED,
    MODEL,
    NODES,
    PROMPT,
    TBT_S,
    TTFT,
    agreement,
    cases,
    formula,
    label,
    rate_s,
    split,
)
from lab.formulas.roofs import chunking_s
from lab.loads.changes import Alike
from tests.lab.ablations.test_readings import table

Values = dict[str, dict[str, Estimated]]


def only(*answers: int) -> Ablation:
    wanted = {label(way, answer) for way in (APART, MIXED) for answer in answers}
    return replace(ANSWERS, cases=lambda n: [case for case in cases(n) if case.label in wanted])


def test_the_simulator_agrees_where_the_difference_is_large():
    values = run(only(64), 300, 3, 1, lambda: None).values
    assert formula(64) == agreement(values, 64) == 1


def flooded(answer: int, chunk_tokens: int = 0) -> int:
    """`agreement` at twice the load of the ablation, where few requests show which way takes less node time; mixed
    nodes with chunks of at most `chunk_tokens`."""
    work = Alike(PROMPT, answer, 2 * rate_s(answer))

    def changed(case: Case) -> Case:
        config = replace(case.config, chunk_tokens=chunk_tokens) if case.config.mixed else case.config
        return replace(case, config=config, workload=replace(case.workload, change=work))

    known = only(answer)
    values = run(replace(known, cases=lambda n: list(map(changed, known.cases(n)))), 150, 3, 1, lambda: None).values
    return agreement(values, answer)


def test_the_simulator_agrees_at_sixteen_tokens():
    assert formula(16) == flooded(16) == 1


def test_at_one_token_only_the_bound_of_steps_without_decodes_is_between_them():
    """The formula bounds every step. An answer of one token is never decoded, so dynamic batching bounds none: then
    mixed nodes take less time than separate ones. With the formula's chunks they take more, as it says."""
    chunk = int(PROMPT * TBT_S / chunking_s(MODEL, PROMPT, 1, TBT_S))
    assert 600 < chunk < MODEL.chunk_tokens
    assert formula(1) == flooded(1, chunk) == 1
    assert flooded(1) == -1


def made(**signs: int) -> Values:
    """A table in which mixed nodes take more time (1), less (-1) or about as much (0) at these lengths, else more."""
    values = table("answers", lambda case, metric: 10.0)
    for answer in LENGTHS:
        above = signs.get(f"at{answer}", 1)
        values[label(MIXED, answer)][TTFT] = Estimated(10.0 + 5 * above, 0.1)
    return values


def places(text: str, words: str) -> list[int]:
    found = re.search(rf"{words}[^.]*? at answers of ([\d, ]+)", text)
    return [int(length) for length in found[1].strip(", ").split(", ")] if found else []


@pytest.mark.parametrize("signs", [{}, {"at1": -1}, {"at1": -1, "at16": 0, "at1024": -1}, {"at64": 0}])
def test_the_reading_says_where_both_differ(signs):
    values = made(**signs)
    text = ANSWERS.reading(values)
    by_side = {side: [n for n in LENGTHS if agreement(values, n) == side] for side in (1, -1, 0)}
    assert by_side[1] + by_side[-1] + by_side[0] != []
    words = {1: "agrees with the formula", -1: "contradicts the formula", 0: r"says nothing \(no difference shown\)"}
    assert {side: places(text, words[side]) for side in words} == by_side
    pays = {1: "of 1 pay for separate nodes", -1: "of 1 do not pay for separate nodes"}
    assert pays[signs.get("at1", 1)] in text


def test_both_ways_get_the_same_load_on_the_same_number_of_nodes():
    by_label = {case.label: case for case in cases(50)}
    for answer in LENGTHS:
        apart, mixed = by_label[label(APART, answer)], by_label[label(MIXED, answer)]
        assert apart.config.prefill + apart.config.decode == mixed.config.mixed == NODES
        rows = [case.workload.change([None] * 50, 3) for case in (apart, mixed)]
        assert rows[0] == rows[1] and {row.output_length for row in rows[0]} == {answer}
    assert split(1) == NODES - 1 > split(1024) and rate_s(1) > rate_s(1024)
