"""Tensor parallelism in one process: a thread per rank, gloo between them, one KV pool for all.

The shards of every family, put together, are the whole model: the same logits, and the same bytes in the pool.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import FileStore

from attention.choice.choose import choose
from cache.block import BlockGeometry
from engine.checkpoint import weights
from engine.checkpoint.model_source import ModelSource, describe
from engine.config.flags import parse
from engine.loading.rank_processes import RankProcesses, RanksLost, bare_row
from engine.model.decoder import Model, Outside
from engine.model.model_config import ModelConfig
from engine.model.parallel import ProcessRanks, Shard
from engine.sampling.logprobs import PromptScores
from engine.sampling.token_logprobs import PromptLogprobs
from engine.step.runner import Row, Runner
from tests.engine.model.test_model import TOLERANCE, blocks_for, tokens
from tests.engine.tiny_families import FAMILIES, empty_pool, ours, save
from tests.engine.tiny_llama import BLOCK_SIZE, logits_of

CASES = {name: 2 for name in FAMILIES if "olmo2" not in name} | {"mistral": 4, "qwen2": 4, "gemma2": 4}
"""Family -> ranks; one rank computes OLMo 2 (joint_qk_norm). 4 ranks are more than the 1 or 2 KV heads; 211 rows of the
head divide by none."""


@pytest.fixture(scope="module", params=CASES)
def saved(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    directory = tmp_path_factory.mktemp(request.param)
    save(request.param, directory)
    return directory, CASES[request.param]


def side_by_side(size: int, work: Callable[[int], Any]) -> list[Any]:
    """work(rank) in one thread per rank; raises what the first of them raised."""
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)
    return results


def runner_of(source: ModelSource, pool: Tensor, rank: int, size: int, store: Path) -> Runner:
    shard = Shard(source.config, rank, size)
    part = weights.load(source, pool.dtype, shard=shard)
    ranks = ProcessRanks(FileStore(str(store), size), rank, size, torch.device("cpu"))
    model = Model(shard.config, part, choose("torch", "cpu", sinks=source.config.sinks), outside=Outside(ranks))
    return Runner(model, pool[:, :, :, shard.kv_heads], BLOCK_SIZE)


def test_all_ranks_together_are_the_model(saved, tmp_path):
    directory, size = saved
    source, whole = ours(directory)
    pool = empty_pool(source, torch.float32)
    ids = tokens(60)
    steps = [Row(ids[:33], 0, blocks_for(60)), *(Row(ids[i : i + 1], i, blocks_for(60)) for i in range(33, 36))]
    steps.append(Row(ids[36:], 36, blocks_for(60)))

    def compute(rank: int) -> list[Tensor]:
        runner = runner_of(source, pool, rank, size, tmp_path / "store")
        return [logits_of(runner, [row]) for row in steps]

    together = side_by_side(size, compute)[0]
    for row, logits in zip(steps, together, strict=True):
        torch.testing.assert_close(logits, logits_of(whole, [row]), **TOLERANCE)
    torch.testing.assert_close(pool, whole.kv_pool, equal_nan=True, **TOLERANCE)


def test_a_layer_is_reported_when_every_rank_has_written_it(tmp_path):
    """What rank 0 reports is pushed to other nodes at once: no rank's heads may be missing."""
    save("qwen3", tmp_path)
    source = describe(str(tmp_path))
    pool = empty_pool(source, torch.float32)
    ids, missing = tokens(48), []

    def compute(rank: int) -> None:
        runner = runner_of(source, pool, rank, 2, tmp_path / "store")

        def on_layer(layer: int) -> None:
            missing.append(int(pool[blocks_for(48), layer].isnan().sum()))

        if rank == 0:
            runner.step([Row(ids, 0, blocks_for(48))], on_layer)
        else:
            runner.follow([Row(ids, 0, blocks_for(48))])

    side_by_side(2, compute)
    assert missing == [0] * source.config.num_layers


def test_prompts_are_scored_by_all_ranks_together(tmp_path):
    save("llama-bias", tmp_path)
    source, whole = ours(tmp_path)
    pool = empty_pool(source, torch.float32)
    ids, found, expected = tokens(150), PromptLogprobs(), PromptLogprobs()

    def asking(into: PromptLogprobs) -> Row:
        return Row(ids, 0, blocks_for(150), scores=PromptScores(0, ids[1:], 3, into))

    def compute(rank: int) -> None:
        runner = runner_of(source, pool, rank, 2, tmp_path / "store")
        if rank == 0:
            runner.step([asking(found)])
        else:
            runner.follow([bare_row(asking(PromptLogprobs()))])

    side_by_side(2, compute)
    whole.step([asking(expected)])
    assert len(found) == len(expected) == 149
    for one, other in zip(found, expected, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]


def test_a_step_behind_an_aborted_collective_has_no_results(tmp_path, monkeypatch):
    """On GPUs a step has only been queued when its code ends; a rank may be lost while it runs there."""
    save("qwen3", tmp_path)
    source, geometry = describe(str(tmp_path)), BlockGeometry(1, 1, 16, 16, "float32")
    processes = RankProcesses(parse(["--device", "cuda"]), geometry, source, None)  # no other rank

    def synchronize() -> None:
        processes.lost = "tensor-parallel rank 1 ended with exit code -9"

    monkeypatch.setattr(torch.accelerator, "synchronize", synchronize)
    with pytest.raises(RanksLost, match="rank 1 ended"), processes.step([]):
        pass
    with pytest.raises(RanksLost, match="rank 1 ended"), processes.step([]):
        raise AssertionError("no step starts any more")
    processes.close()


def test_shards_are_a_partition():
    """Every element of a split weight is on exactly one rank, but for repeated KV heads and the head's padding."""
    config = ModelConfig(
        num_layers=1, hidden_size=8, num_heads=4, num_kv_heads=2, head_size=2, intermediate_size=12, vocab_size=10
    )
    for name, shape in {**weights.shapes(config), "layers.0.q_bias": (8,), "layers.0.experts.3.down": (8, 12)}.items():
        whole = torch.arange(1, 1 + torch.Size(shape).numel()).view(shape)
        parts = [Shard(config, rank, 4).cut(name, whole) for rank in range(4)]
        kind = name.rpartition(".")[2]
        if kind in ("k", "v"):
            assert torch.equal(parts[0], parts[1]) and torch.equal(parts[2], parts[3])
            assert torch.equal(torch.cat((parts[0], parts[2])), whole)
        elif kind in ("o", "down"):
            assert torch.equal(torch.cat(parts, dim=1), whole)
        elif kind in ("q", "gate", "up", "q_bias"):
            assert torch.equal(torch.cat(parts), whole)
        elif kind == "lm_head":
            assert torch.equal(torch.cat(parts)[:10], whole) and not torch.cat(parts)[10:].any()
        else:
            assert all(part is whole for part in parts), name
    assert [Shard(config, rank, 4).kv_heads for rank in range(4)] == [slice(0, 1)] * 2 + [slice(1, 2)] * 2


@pytest.mark.parametrize(
    ("changes", "ranks", "words"),
    [
        ({}, 3, "4 attention heads do not divide by 3"),
        ({"num_heads": 12}, 8, "12 attention heads do not divide by 8"),
        ({"intermediate_size": 30}, 4, "30 MLP columns do not divide by 4"),
        ({"num_experts": 4, "experts_per_token": 2, "expert_size": 6}, 4, "6 columns of an expert"),
        ({"joint_qk_norm": True}, 2, "normalised over all heads together"),
        ({"num_kv_heads": 6, "num_heads": 12}, 4, "6 KV heads can neither be split nor repeated over 4"),
    ],
)
def test_what_cannot_be_split_is_said(changes, ranks, words):
    sizes = {"num_layers": 1, "hidden_size": 8, "num_heads": 4, "num_kv_heads": 4, "head_size": 2, "vocab_size": 9}
    config = ModelConfig(**(sizes | {"intermediate_size": 32} | changes))
    reason = config.indivisible(ranks)
    assert reason is not None and words in reason
    assert config.indivisible(1) is None
