"""The gated delta rule over states in the pool by every rule of the CPU, against the definition in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attention.choice.choose import made
from attention.cpu.delta_rule import CpuRule
from attention.cpu.level import levels_here
from attention.delta_states import Rule, TorchRule, rule_of
from attention.states import Place, StateSlots
from lab.bench.attention.delta_grid import Case, Point, find_delta_fault, joined, out_of, points

HERE = levels_here()
ON_CPU = pytest.mark.skipif(not HERE, reason="the cpu backend needs x86 with AVX2, or aarch64")
GRID = list(points())
QUICK = set(points(quick=True))
RULES = ["torch", *(pytest.param(level, marks=ON_CPU) for level in HERE)]


def rule_named(name: str) -> Rule:
    return TorchRule() if name == "torch" else CpuRule(name)


@pytest.fixture
def threads():
    """Sets torch's number of threads for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "point", [pytest.param(p, marks=[] if p in QUICK else [pytest.mark.heavy]) for p in GRID], ids=str
)
@pytest.mark.parametrize("name", RULES)
def test_no_further_from_the_truth_than_twice_plain_torch(name, point, threads):
    threads(1 + GRID.index(point) % 2)
    assert find_delta_fault(rule_named(name), point) is None


@ON_CPU
@pytest.mark.parametrize("level", HERE)
def test_more_threads_than_heads_divide_the_columns(level, threads):
    """Whole outputs and states, for slices of one width and with a rest."""
    for heads in ((1, 1, 32, 128), (1, 1, 16, 72)):
        point = Point("chunks", heads, 0.05, False, torch.float32)
        threads(1)
        out, states, _ = Case(point).run(CpuRule(level))
        threads(5)
        assert find_delta_fault(CpuRule(level), point) is None
        divided, after, _ = Case(point).run(CpuRule(level))
        assert torch.equal(out, divided) and torch.equal(states, after)


@ON_CPU
@pytest.mark.parametrize("level", HERE)
@pytest.mark.parametrize("by_channel", [False, True], ids=["head", "channel"])
def test_long_prompts_with_little_decay_do_not_drift(level, by_channel):
    """A factor that is wrong by a bit, always the same way, would show after thousands of tokens."""
    point = Point("one decode", (1, 1, 16, 16), 1e-5, by_channel, torch.float32)
    case = Case(point)
    tokens = case.tokens_of(4000)
    state = case.states[0].unflatten(0, case.matrix)
    found = {}
    for rule in (TorchRule(), CpuRule(level)):
        memory = torch.zeros(1, case.slots.elements)
        place, blocks = Place(memory, StateSlots(((0, 0, memory.shape[1]),))), torch.zeros(1, 1, dtype=torch.int64)
        place.write(blocks, state.flatten()[None])
        rule.chunk(tokens, place, blocks, None, blocks, out_of(tokens))
        found[rule.name] = memory.clone()
    torch.testing.assert_close(found["cpu"], found["torch"], rtol=1e-4, atol=1e-4)


@ON_CPU
def test_a_chunk_in_parts_is_the_whole_chunk():
    """Through a state in another block, at cuts that are no pieces."""
    case, rule = Case(Point("one decode", (2, 4, 64, 32), 0.05, True, torch.float32)), CpuRule(HERE[0])
    tokens, place = case.tokens_of(100), Place(case.memory, case.slots)
    whole, parts = out_of(tokens), out_of(tokens)
    rule.chunk(tokens, place, case.read, None, case.write, whole)
    read = case.read
    for first, last in ((0, 1), (1, 34), (34, 100)):
        rule.chunk(tokens.part(first, last), place, read, None, case.write, parts[first:last])
        read = case.write
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-5)


def test_the_backend_decides_who_computes():
    assert rule_of(made("torch")).name == rule_of(made("reference")).name == "torch"
    if HERE:
        assert rule_of(made("cpu")).name == "cpu"


@ON_CPU
def test_refuses_what_does_not_fit():
    case, rule = Case(Point("decodes", (2, 4, 64, 32), 0.05, False, torch.float32)), CpuRule(HERE[0])
    tokens, place = joined(case.tokens, "cpu"), Place(case.memory, case.slots)
    arguments = (tokens, place, case.read, case.fresh, case.write, out_of(tokens))

    def refused(message: str, step: bool = True, **changed: object) -> None:
        names = ("tokens", "place", "read", "fresh", "write", "out")
        given = dict(zip(names, arguments, strict=True)) | changed
        with pytest.raises(ValueError, match=message):
            (rule.step if step else rule.chunk)(**given)

    refused("has tokens of", out=out_of(tokens)[:2])
    refused("has tokens of", tokens=replace(tokens, decay=tokens.decay[:, :1]))
    refused("one type", out=out_of(tokens).bfloat16())
    refused("is not one of states", place=Place(case.memory, case.slots.between(0, 7)))
    refused("differ in shape", write=case.write[:, :1])
    refused("one of each", read=case.read[:2], write=case.write[:2])
    refused("of one request", step=False)
    doubles = replace(tokens, q=tokens.q.double(), k=tokens.k.double(), v=tokens.v.double())
    refused("float64", tokens=doubles, out=out_of(doubles))
