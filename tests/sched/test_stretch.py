"""How far objectives are missed when not all can be kept: the same factor for prompts and for streams."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sched.batching import SLOWDOWN, DynamicChunks, StepLoad
from sched.classes import CLASSES, scaled
from sched.stretch import MOST, Waiting, stretch


class Linear:
    """1 ms per token of any kind."""

    def decode_seconds(self, decodes: int, decode_context: int) -> float:
        return decodes / 1000

    def prefill_seconds(self, tokens: int, context: int) -> float:
        return tokens / 1000

    def largest_chunk(self, seconds: float, decodes: int, decode_context: int, prefill_context: int) -> int:
        return round(seconds * 1000) - decodes


NAMES = list(CLASSES)
PROMPT = st.builds(Waiting, st.sampled_from(NAMES), st.floats(0, 30), st.integers(1, 4000), st.integers(0, 4000))


def prefill_s(tokens: int, context: int) -> float:
    return 1e-3 * tokens + 1e-8 * tokens * (tokens + 2 * context)


def misses(prompts: Sequence[Waiting], alone_s: float, step_s: float) -> list[float]:
    """Time to first token of each prompt as a multiple of its objective, if every step takes step_s > alone_s."""
    work, found = 0.0, []
    for prompt in prompts:
        work += prefill_s(prompt.tokens, prompt.context)
        took = prompt.waited_s + work / (1 - alone_s / step_s)
        found.append(took / CLASSES[prompt.service_class].ttft_s)
    return found


@given(st.lists(PROMPT, max_size=8), st.floats(0.001, 0.3), st.sampled_from(NAMES))
def test_the_stretch_is_the_smallest_that_all_prompts_keep(prompts, alone_s, name):
    tbt_s = CLASSES[name].tbt_s
    found = stretch(prompts, alone_s, tbt_s, CLASSES, prefill_s)
    assert 1 <= found <= MOST
    if found < MOST and found * tbt_s > alone_s:
        assert all(miss <= found * (1 + 1e-6) for miss in misses(prompts, alone_s, found * tbt_s))
    less = found * (1 - 1e-3)
    if found > 1 and less * tbt_s > alone_s:
        assert any(miss > less for miss in misses(prompts, alone_s, less * tbt_s))


def test_without_late_prompts_nothing_is_stretched():
    assert stretch([], 0.02, 0.1, CLASSES, prefill_s) == 1
    assert stretch([Waiting("standard", 0.5, 512, 0)] * 5, 0.02, 0.1, CLASSES, prefill_s) == 1
    assert stretch([Waiting("standard", 0.5, 512, 0)] * 12, 0.02, 0.1, CLASSES, prefill_s) > 1


@pytest.mark.parametrize(
    ("classes", "prompts", "tokens"),
    [
        ({"standard"}, [Waiting("standard", 0.0, 512, 0)], 100 - 8),
        ({"interactive", "standard"}, [Waiting("standard", 0.0, 512, 0)], 50 - 8),
        ({"batch"}, [Waiting("standard", 0.0, 512, 0)], 1000 - 8),
        ({"standard"}, [Waiting("standard", 60.0, 512, 0)], 400 - 8),
        ({"standard"}, [Waiting("batch", 60.0, 512, 0)], 100 - 8),
    ],
)
def test_a_step_takes_as_long_as_the_objectives_of_its_requests_let_it(classes, prompts, tokens):
    load = StepLoad(1016, 8, 800, 0, classes, prompts)
    assert DynamicChunks(0.0, Linear()).prefill_tokens(load) == tokens
    assert DynamicChunks(0.07, Linear()).prefill_tokens(load) == 70 - 8, "a fixed limit"
    doubled = DynamicChunks(0.0, Linear(), scaled(CLASSES, 2.0)).prefill_tokens(load)
    assert doubled >= tokens and SLOWDOWN * 8 < 50
