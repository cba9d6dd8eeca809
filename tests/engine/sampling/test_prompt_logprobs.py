"""Log probabilities of prompts: equal to those of transformers, however the prompt is cut, cached and preempted."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.block import BlockGeometry
from cache.keys import root_key
from cache.pool.block_pool import BlockPool
from engine.core.batcher import Batcher
from engine.front.flight import PromptItems
from engine.handoff.messages import pack_prompt_logprobs, unpack_prompt_logprobs
from engine.loading.rank_processes import bare_row
from engine.model.decoder import SCORED_AT_ONCE
from engine.sampling import token_logprobs
from engine.sampling.logprobs import PromptScores
from engine.sampling.params import SamplingParams, TokenLogprobs
from engine.sampling.token_logprobs import PromptLogprobs
from engine.step.request import Request
from engine.step.rows import row_of
from engine.step.runner import Row, Runner
from engine.step.step import ScheduledRow
from tests.engine.tiny_llama import BLOCK_SIZE, runner, tiny

ROOT = root_key("tiny", BlockGeometry(3, 2, 32, BLOCK_SIZE, "float32"))
PROMPT = torch.randint(0, 211, (150,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.fixture(scope="module")
def theirs():
    return tiny()


@pytest.fixture(scope="module")
def expected(theirs):
    """[150, vocab] log probabilities after each token of PROMPT, by transformers."""
    with torch.inference_mode():
        return theirs(torch.tensor([PROMPT])).logits[0].log_softmax(-1)


def asking(name: str, prompt: list[int], top: int | None, max_tokens: int = 1) -> Request:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, prompt_logprobs=top)
    return Request(name, list(prompt), len(prompt), params, 0.0, ROOT)


def batcher(budget: int, num_blocks: int = 64) -> Batcher:
    return Batcher(BlockPool(num_blocks), BLOCK_SIZE, 8, budget, 500, {-1})


def run(ours: Runner, requests: Batcher, most: int = 100) -> list[int]:
    """Steps until nothing is left; the number of tokens that each computed."""
    sizes = []
    while (step := requests.schedule(0.0)) is not None:
        sampled = ours.step([row_of(row, (-1,)) for row in step.rows])
        requests.commit(0.0, step, [[token.token_id for token in chosen] or None for chosen in sampled])
        sizes.append(step.num_tokens)
        assert len(sizes) < most
    return sizes


def check(found: PromptLogprobs, prompt: list[int], expected: torch.Tensor, top: int) -> None:
    assert len(found) == len(prompt) - 1
    for i, one in enumerate(found):
        assert one.logprob == pytest.approx(expected[i, prompt[i + 1]].item(), abs=1e-4)
        values, ids = expected[i].topk(top) if top else (torch.empty(0), torch.empty(0))
        assert [token for token, _ in one.top] == ids.tolist()
        assert [value for _, value in one.top] == pytest.approx(values.tolist(), abs=1e-4)
        nearly = expected[i] - expected[i, prompt[i + 1]]  # ours round differently
        assert (nearly > 1e-4).sum() < one.rank <= (nearly > -1e-4).sum()


@pytest.mark.parametrize("budget", [500, 64, 37])
def test_equal_to_transformers_in_one_step_and_in_chunks(theirs, expected, budget):
    ours, requests = runner(theirs), batcher(budget)
    long, short, plain = asking("long", PROMPT, 5), asking("short", PROMPT[:9], 0), asking("plain", PROMPT[:30], None)
    assert len(PROMPT) > 2 * SCORED_AT_ONCE  # the head computes them in three parts
    for request in (long, short, plain):
        requests.add(0.0, request)
    run(ours, requests)
    check(long.prompt_logprobs, PROMPT, expected, 5)
    check(short.prompt_logprobs, PROMPT[:9], expected, 0)
    assert not plain.prompt_logprobs


def test_a_cached_prefix_is_computed_again_for_its_logits_and_reused_by_others(theirs, expected):
    ours, requests = runner(theirs), batcher(500)
    requests.add(0.0, asking("first", PROMPT, None))
    assert run(ours, requests) == [len(PROMPT)]
    scored = asking("scored", PROMPT, 2)
    requests.add(0.0, scored)
    assert requests.loads(0.0, 4) == []  # nor is it looked for in the pool
    assert run(ours, requests) == [len(PROMPT)]
    assert scored.num_cached == 0
    check(scored.prompt_logprobs, PROMPT, expected, 2)
    requests.add(0.0, asking("third", PROMPT, None))
    assert run(ours, requests) == [len(PROMPT) % BLOCK_SIZE]


def test_a_preempted_prompt_is_scored_once(theirs, expected):
    ours, requests = runner(theirs), batcher(64)
    scored = asking("scored", PROMPT, 3)
    requests.add(0.0, scored)
    step = requests.schedule(0.0)
    ours.step([row_of(row, (-1,)) for row in step.rows])
    requests.commit(0.0, step, [None])
    known = len(scored.prompt_logprobs)
    assert known == 64
    requests.seats.lose(0.0, scored)
    run(ours, requests)
    check(scored.prompt_logprobs, PROMPT, expected, 3)


def test_what_is_told_already_is_not_computed_again():
    """A request that goes on elsewhere, with tokens of its output."""
    request = asking("resumed", [5, 6, 7], 2, max_tokens=4)
    request.token_ids.append(9)
    assert not request.scores_prompt
    request.block_ids = [0]
    assert row_of(ScheduledRow(request, 0, 4, samples=True), (-1,)).scores is None


def test_a_prompt_of_one_token_has_none(theirs):
    ours, requests = runner(theirs), batcher(64)
    one = asking("one", [7], 3)
    requests.add(0.0, one)
    run(ours, requests)
    assert one.num_output_tokens == 1 and not one.prompt_logprobs


def test_decodes_beside_a_scored_prompt_get_their_own_logits(theirs):
    """The scored rows stand behind the sampled ones."""
    alone, together = runner(theirs), runner(theirs)
    for ours in (alone, together):
        ours.step([Row([3, 4, 5], 0, [0])])
    sample = row_of(ScheduledRow(decoding(), 3, 1, samples=True), (-1,))
    expected = alone.step([sample])
    found = PromptLogprobs()
    prompt = Row(PROMPT[:40], 0, [1, 2, 3], scores=PromptScores(0, PROMPT[1:41], 1, found))
    assert together.step([prompt, sample]) == [[], *expected]
    assert len(found) == 40


def decoding() -> Request:
    request = asking("decoding", [3, 4, 5], None, max_tokens=4)
    request.token_ids.append(6)
    request.block_ids = [0]
    return request


def test_other_ranks_are_sent_the_question_and_no_answers():
    scores = PromptScores(0, [2, 3], 1, PromptLogprobs([TokenLogprobs(-1.0)]))
    row = Row([1, 2, 3], 0, [0], scores=scores)
    assert bare_row(row).scores == replace(scores, found=PromptLogprobs())
    assert len(scores.found) == 1


logprob = st.floats(-1000, 0, width=32)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 20), st.integers(1, 9), st.data())
def test_they_travel_as_they_are(top, count, data):
    others = st.lists(st.tuples(st.integers(0, 2**32 - 1), logprob), min_size=top, max_size=top)
    rank = st.integers(1, 2**32 - 1)
    found = [TokenLogprobs(data.draw(logprob), data.draw(others), data.draw(rank)) for _ in range(count)]
    request = asking("r", [1] * (count + 1), top)
    request.prompt_logprobs = PromptLogprobs(found)
    body, parts = pack_prompt_logprobs(request)
    assert (body.id, body.count) == ("r", count)
    assert list(unpack_prompt_logprobs(body, memoryview(b"".join(parts)))) == found
    with pytest.raises(ValueError):
        unpack_prompt_logprobs(body, memoryview(b"".join(parts)[:-1]))


def test_impossible_tokens_are_minus_infinity_on_the_wire():
    request = asking("r", [1, 2], 1)
    request.prompt_logprobs = PromptLogprobs([TokenLogprobs(-math.inf, [(3, -0.5)])])
    body, parts = pack_prompt_logprobs(request)
    assert unpack_prompt_logprobs(body, memoryview(b"".join(parts))) == request.prompt_logprobs


def test_nothing_is_made_of_them_on_their_way_but_what_is_read(monkeypatch):
    """That way is the event loop's, on three nodes."""
    made = []

    class Counted(TokenLogprobs):
        def __init__(self, *fields: Any) -> None:
            super().__init__(*fields)
            made.append(self)

    request = asking("r", list(range(2000)), 20)
    request.prompt_logprobs = PromptLogprobs(
        TokenLogprobs(-1.0, [(i, -2.0) for i in range(20)], 1) for _ in range(1999)
    )
    monkeypatch.setattr(token_logprobs, "TokenLogprobs", Counted)
    body, parts = pack_prompt_logprobs(request)
    items = PromptItems(request.token_ids[1:], unpack_prompt_logprobs(body, memoryview(b"".join(parts))))
    assert (len(items), len(made)) == (1999, 0)
    assert (items[7].token_id, items[7].top[19]) == (8, (19, -2.0)) and len(made) == 2
    assert [item.token_id for item in items[-2:]] == [1998, 1999]
    with pytest.raises(RuntimeError, match="1999 log probabilities for 1998"):
        PromptItems(request.token_ids[2:], request.prompt_logprobs)


def test_a_token_has_as_many_others_as_those_before_it():
    found = PromptLogprobs([TokenLogprobs(-1.0, [(1, -0.5)])])
    with pytest.raises(ValueError, match="2 alternatives"):
        found.append(TokenLogprobs(-1.0, [(1, -0.5), (2, -0.7)]))
    assert len(found) == 1 and found == PromptLogprobs(list(found)) != PromptLogprobs()
