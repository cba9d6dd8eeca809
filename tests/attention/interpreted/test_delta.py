"""The gated delta rule over states in the pool by the Triton kernels, against the definition in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attention.delta_states import rule_of
from attention.states import Place
from attention.triton.backend import TritonBackend
from attention.triton.delta.rule import MOST_KEYS, TritonRule
from lab.bench.attention.delta_grid import Case, Point, find_delta_fault, out_of
from tests.attention.interpreted.cases import DEVICE, DTYPES, grid

HEADS = ((1, 2, 32, 16), (1, 3, 12, 20))
CASES = [(mix, heads) for mix in ("decodes", "short chunks", "everything") for heads in HEADS]


@pytest.mark.parametrize(("case", "decay", "dtype"), grid(CASES, (0.05, 3.0)))
@pytest.mark.parametrize("by_channel", [False, True], ids=["head", "channel"])
def test_no_further_from_the_truth_than_twice_plain_torch(
    case: tuple[str, tuple[int, int, int, int]], decay: float, dtype: torch.dtype, by_channel: bool
) -> None:
    mix, heads = case
    point = Point(mix, heads, decay, by_channel, dtype, moves=heads[1] == 2)
    assert find_delta_fault(TritonRule(), point, DEVICE) is None


def test_strong_decays_do_not_overflow() -> None:
    for by_channel in (False, True):
        point = Point("chunks", HEADS[0], 40.0, by_channel, DTYPES[0])
        assert find_delta_fault(TritonRule(), point, DEVICE) is None


@pytest.mark.heavy
@pytest.mark.parametrize("by_channel", [False, True], ids=["head", "channel"])
def test_the_heads_of_published_models(by_channel: bool) -> None:
    point = Point("everything", (1, 2, 128, 128), 0.05, by_channel, torch.bfloat16)
    assert find_delta_fault(TritonRule(), point, DEVICE) is None


def test_the_backend_has_the_rule() -> None:
    assert rule_of(TritonBackend()).name == "triton"


def test_refuses_what_it_cannot_compute() -> None:
    case, rule = Case(Point("one decode", HEADS[0], 0.05, False, torch.float32)), TritonRule()
    (tokens,) = case.tokens
    place, blocks = Place(case.memory, case.slots), (case.read, case.fresh, case.write)
    apart = replace(tokens, q=torch.zeros(*tokens.q.shape[:-1], 2 * tokens.q.shape[-1])[..., ::2])
    with pytest.raises(ValueError, match="side by side"):
        rule.step(apart, place, *blocks, out_of(tokens))
    wide = Case(Point("one decode", (1, 1, 2 * MOST_KEYS, 16), 0.05, False, torch.float32))
    (tokens,) = wide.tokens
    with pytest.raises(ValueError, match="no delta rule for keys of 256"):
        rule.chunk(tokens, Place(wide.memory, wide.slots), wide.read, None, wide.write, out_of(tokens))
