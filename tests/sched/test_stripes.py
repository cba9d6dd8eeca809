"""The chunks of a prompt on nodes that divide its tokens: all of them once, equal work, no wait for later ones."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sched.chunks import stage_seconds
from sched.stripes import latest_start, owner, played, stripe_sizes, stripes_s

COST = (0.0, 5e-5, 2e-9)


@st.composite
def prompts(draw):
    """(tokens, done, nodes, most, align)"""
    align, nodes = draw(st.sampled_from([1, 4, 16])), draw(st.integers(2, 6))
    tokens = draw(st.integers(nodes * align + 2, 4000))
    done = draw(st.integers(0, latest_start(tokens, nodes, align) // align)) * align
    return tokens, done, nodes, draw(st.integers(align, 600)), align


@given(prompts(), st.sampled_from([COST, (0.01, 1e-3, 1e-7), (0.01, 1e-3, 0.0)]))
def test_every_token_has_one_node_and_every_node_a_chunk(prompt, cost):
    tokens, done, nodes, most, align = prompt
    sizes = stripe_sizes(tokens, done, nodes, 30, cost, most, align)
    assert done + sum(sizes) == tokens and all(size % align == 0 for size in sizes[:-1])
    assert all(0 < size <= max(align, most) + 1 for size in sizes)  # one more, so that no chunk is a single token
    assert sizes[-1] > 1
    owners = [owner(chunk, len(sizes), nodes) for chunk in range(len(sizes))]
    assert set(owners) == set(range(nodes)) and owners[-1] == nodes - 1
    assert all(b == (a + 1) % nodes for a, b in pairwise(owners))


@pytest.mark.parametrize("nodes", [2, 4, 8])
def test_causal_work_is_equal(nodes):
    """131,072 tokens: attention is five times the rest, and no node has a tenth more than another."""
    sizes = stripe_sizes(131072, 0, nodes, 80, COST, 8192, 64)
    seconds = stage_seconds(sizes, 0, COST, 1.0)
    work = [sum(s for chunk, s in enumerate(seconds) if owner(chunk, len(sizes), nodes) == i) for i in range(nodes)]
    assert max(work) < 1.1 * min(work)
    assert sum(work) / nodes <= stripes_s(seconds, nodes, 80) < 1.2 * sum(work) / nodes


def test_a_prompt_of_too_few_blocks_is_not_divided():
    assert latest_start(66, 4, 16) == 16
    assert stripe_sizes(66, 16, 4, 30, COST, 512, 16) == [16, 16, 16, 2]
    with pytest.raises(ValueError, match="too few for 4 nodes"):
        stripe_sizes(66, 32, 4, 30, COST, 512, 16)
    with pytest.raises(ValueError, match="too few for 4 nodes"):
        latest_start(48, 4, 16)


@given(st.lists(st.floats(0.1, 5), min_size=1, max_size=12), st.integers(1, 5), st.integers(1, 40), st.floats(0, 1))
def test_each_layer_waits_for_the_same_layer_of_the_chunk_before(seconds, nodes, layers, hop_s):
    found = played(seconds, nodes, layers, hop_s)
    for chunk, (begin, end) in enumerate(found):
        layer_s = seconds[chunk] / layers
        assert end - begin >= seconds[chunk] - 1e-9
        if chunk:
            before_begin, before_end = found[chunk - 1]
            assert begin >= before_begin + seconds[chunk - 1] / layers + hop_s - 1e-9
            assert end >= before_end + layer_s + hop_s - 1e-9
        if chunk >= nodes:
            assert begin >= found[chunk - nodes][1]
    assert stripes_s(seconds, nodes, layers, hop_s) >= sum(seconds) / nodes - 1e-9
    assert stripes_s(seconds, 1, layers) == pytest.approx(sum(seconds))
