"""Our decoder against transformers' LlamaForCausalLM on tiny random models."""

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from attention.choice.choose import choose
from engine.model.decoder import Model
from engine.model.rope import Rope
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import SamplingRow
from engine.step.runner import Row, Runner
from tests.engine.tiny_llama import BLOCK_SIZE, LLAMA3, logits_of, our_config, our_weights, runner, tiny

GEOMETRIES = [(kv * group, kv, size) for kv, group in ((3, 1), (2, 3), (1, 8)) for size in (32, 64, 80, 128)]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
TOLERANCE = {"atol": 2e-4, "rtol": 1e-4}  # float32; logits are of the order of 10


def tokens(count: int, seed: int = 3) -> list[int]:
    return torch.randint(0, 211, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def their_logits(model: LlamaForCausalLM, ids: list[int]) -> Tensor:
    return model(torch.tensor([ids])).logits[0].float()


def blocks_for(count: int, first: int = 0) -> list[int]:
    """Block ids that are neither sorted nor neighbours."""
    return [(first + 7 * i) % 64 for i in range(-(-count // BLOCK_SIZE))]


def greedy(ours: Runner, ids: list[int], count: int, chunks: list[int], block_ids: list[int]) -> list[int]:
    """Prefill in the given chunks, then decode one by one."""
    known, done = list(ids), 0
    for size in [*chunks, *[1] * (count - 1)]:
        last = done + size == len(known)
        sample = SamplingRow(SamplingParams(temperature=0), known, len(ids)) if last else None
        (sampled,) = ours.step([Row(known[done : done + size], done, block_ids, sample)])
        done += size
        known += [token.token_id for token in sampled]
    return known[len(ids) :]


def their_greedy(model: LlamaForCausalLM, ids: list[int], count: int) -> list[int]:
    out = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(ids) :].tolist()


@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), GEOMETRIES)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_logits_and_greedy_tokens_equal_transformers(heads, kv_heads, head_size, tied):
    theirs = tiny(heads, kv_heads, head_size, tied)
    ids = tokens(45)
    ours = runner(theirs)
    logits = logits_of(ours, [Row(ids, 0, blocks_for(60))])
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, their_logits(theirs, ids), **TOLERANCE)
    assert greedy(runner(theirs), ids, 12, [45], blocks_for(60)) == their_greedy(theirs, ids, 12)


@pytest.mark.parametrize(
    "scaling",
    [
        LLAMA3,
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 4.0},
        YARN,
        YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False, "attention_factor": 1.3},
        YARN | {"mscale": 0.8, "mscale_all_dim": 0.4},
        None,
    ],
    ids=["llama3", "linear", "dynamic", "yarn", "yarn-fine", "yarn-mscale", "default"],
)
def test_rope_scaling(scaling):
    theirs = tiny(rope_scaling=scaling)
    ids = tokens(150)
    config = our_config(theirs)
    rope = Rope(config.head_size, config.rope_theta, config.rope_scaling, torch.device("cpu"))
    torch.testing.assert_close(rope.frequency, theirs.model.rotary_emb.inv_freq, rtol=2e-6, atol=0)
    assert rope.magnitude == pytest.approx(theirs.model.rotary_emb.attention_scaling)
    logits = logits_of(runner(theirs), [Row(ids, 0, blocks_for(150))])
    torch.testing.assert_close(logits, their_logits(theirs, ids), **TOLERANCE)


def test_attention_bias():
    theirs = tiny(bias=True)
    ids = tokens(20)
    torch.testing.assert_close(
        logits_of(runner(theirs), [Row(ids, 0, blocks_for(20))]), their_logits(theirs, ids), **TOLERANCE
    )


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("chunks", [[50], [1] * 50, [16, 16, 18], [7, 43], [33, 1, 16]], ids=str)
def test_chunked_prefill_changes_nothing(chunks, backend):
    theirs = tiny(9, 3, 64)
    ids = tokens(50)
    ours, done, parts = runner(theirs, backend), 0, []
    for size in chunks:
        parts.append(logits_of(ours, [Row(ids[done : done + size], done, blocks_for(50))]))
        done += size
    torch.testing.assert_close(torch.cat(parts), their_logits(theirs, ids), **TOLERANCE)
    assert greedy(runner(theirs, backend), ids, 8, chunks, blocks_for(60)) == their_greedy(theirs, ids, 8)


def test_requests_beside_each_other_do_not_see_each_other():
    """Six requests of other lengths join, are chunked and decode in shared steps; each gets its tokens alone."""
    theirs = tiny(8, 1, 64)
    lengths, wanted, budget = [5, 40, 17, 64, 1, 33], 10, 24
    prompts = [tokens(n, seed=n) for n in lengths]
    ours = runner(theirs)
    known, done = [list(p) for p in prompts], [0] * 6
    block_ids = [list(range(8 * i, 8 * i + 8))[::-1] for i in range(6)]
    while any(len(known[i]) < lengths[i] + wanted for i in range(6)):
        rows, picked, left = [], [], budget
        for i in range(6):
            size = min(len(known[i]) - done[i], left)
            if size and len(known[i]) < lengths[i] + wanted:
                last = done[i] + size == len(known[i])
                sample = SamplingRow(SamplingParams(temperature=0), known[i], lengths[i]) if last else None
                rows.append(Row(known[i][done[i] : done[i] + size], done[i], block_ids[i], sample))
                picked.append((i, size))
                left -= size
        for (i, size), sampled in zip(picked, ours.step(rows), strict=True):
            done[i] += size
            known[i] += [token.token_id for token in sampled]
    for i in range(6):
        assert known[i][lengths[i] :] == their_greedy(theirs, prompts[i], wanted), f"request {i}"


def test_kv_moved_to_another_pool_continues_there():
    """What disaggregation relies on: whole blocks copied to other slots of another pool decode as before."""
    theirs = tiny(9, 3, 64)
    ids, here, there = tokens(40), [3, 9, 1], [20, 5, 11]
    prefill, decode = runner(theirs), runner(theirs)
    sample = SamplingRow(SamplingParams(temperature=0), ids, 40)
    ((first,),) = prefill.step([Row(ids, 0, here, sample)])
    decode.kv_pool[there] = prefill.kv_pool[here]
    known = [*ids, first.token_id]
    for _ in range(7):
        row = SamplingRow(SamplingParams(temperature=0), known, 40)
        ((sampled,),) = decode.step([Row(known[-1:], len(known) - 1, there, row)])
        known.append(sampled.token_id)
    assert known[40:] == their_greedy(theirs, ids, 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_as_close_to_float32_as_transformers(dtype):
    """Rounding differs between implementations; its size must not."""
    theirs = tiny(9, 3, 64)
    ids = tokens(60)
    truth = their_logits(theirs, ids)
    theirs = theirs.to(dtype)
    ours = logits_of(runner(theirs), [Row(ids, 0, blocks_for(60))])
    assert ours.dtype == torch.float32
    error, plain = (ours - truth).abs(), (their_logits(theirs, ids) - truth).abs()
    assert error.mean() <= 1.2 * plain.mean()
    assert error.max() <= 2 * plain.max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_casts_follow_transformers(dtype):
    """Without attention in the way (one token: softmax of one score), the logits are the same bits."""
    theirs = tiny(6, 2, 32).to(dtype)
    ours = logits_of(runner(theirs), [Row([17], 0, [0])])
    assert torch.equal(ours, their_logits(theirs, [17]))


def test_weights_that_do_not_match_are_named():
    theirs = tiny()
    weights = our_weights(theirs)
    del weights["layers.1.up"]
    with pytest.raises(ValueError, match=r"lack layers\.1\.up"):
        Model(our_config(theirs), weights, choose("torch", "cpu"))
    weights = our_weights(theirs) | {"layers.9.q": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"no place for these weights: layers\.9\.q"):
        Model(our_config(theirs), weights, choose("torch", "cpu"))


def test_no_logits_when_none_are_asked_for():
    ours = runner(tiny())
    assert ours.step([Row(tokens(20), 0, blocks_for(20))]) == [[]]
    assert ours.kv_pool[blocks_for(20)[0]].isfinite().all()
