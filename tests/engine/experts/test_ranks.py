"""Experts on several ranks: real processes, one tiny model of each family, the same tokens as one process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attention.choice.choose import choose
from engine.checkpoint.model_source import ModelSource, describe
from engine.config.config import Config
from engine.experts.group import ExpertGroup
from engine.experts.loading import load_rest
from engine.experts.processes import ExpertProcesses
from engine.model.decoder import Model
from engine.step.runner import Row, Runner
from tests.engine.model.test_model import TOLERANCE, blocks_for, tokens
from tests.engine.tiny_families import empty_pool, ours, save
from tests.engine.tiny_llama import BLOCK_SIZE, logits_of


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def path(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            save(name, made[name])
        return made[name]

    return path


class Ranks:
    """A model whose experts are on several ranks."""

    def __init__(self, source: ModelSource, config: Config) -> None:
        self.processes = ExpertProcesses(config, source)
        try:
            weights = load_rest(source, torch.float32, None, None)
            self.processes.fill_own(None)
            self.group: ExpertGroup = self.processes.join()
            self.model = Model(source.config, weights, choose("torch", "cpu"), experts=self.group)
            self.runner = Runner(
                self.model, empty_pool(source, torch.float32), BLOCK_SIZE, around_forward=self.group.step
            )
        except BaseException:
            self.processes.close()
            raise

    def logits(self, ids: list[int], start: int = 0, end: int | None = None) -> Tensor:
        """Of the last token; computes ids[start:end]."""
        self.group.begin()
        return logits_of(self.runner, [Row(ids[start:end], start, blocks_for(len(ids)))])

    def until(self, ready: Callable[[dict[str, Any]], bool], timeout_s: float = 60.0) -> None:
        """Begin steps until the state is as wanted."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.group.begin()
            if ready(self.processes.state()):
                return
            time.sleep(0.05)
        raise AssertionError(f"not in {timeout_s} s: {self.processes.state()}")


@contextmanager
def ranks(path: Path, **flags: Any) -> Iterator[Ranks]:
    flags = {"expert_parallel_size": 2, "max_num_batched_tokens": 64} | flags
    config = Config(model=str(path), dtype="float32", device="cpu", num_threads=1, **flags)
    made = Ranks(describe(str(path)), config)
    try:
        yield made
    finally:
        made.processes.close()


def all_logits(compute: Callable[[list[int], int, int | None], Tensor]) -> list[Tensor]:
    """Of a prompt, of single tokens, and of more tokens than a message has room for."""
    ids = tokens(140)
    parts = [(0, 33), (33, 34), (34, 35), (35, 140)]
    return [compute(ids, begin, end) for begin, end in parts]


def expected(path: Path) -> list[Tensor]:
    _, whole = ours(path)
    return all_logits(lambda ids, a, b: logits_of(whole, [Row(ids[a:b], a, blocks_for(len(ids)))]))


@pytest.mark.parametrize(("family", "size", "more"), [("mixtral", 2, {}), ("qwen3moe", 3, {}), ("deepseek3", 4, {})])
def test_the_same_as_one_process(saved, family, size, more):
    path = saved(family)
    with ranks(path, expert_parallel_size=size, **more) as made:
        found = all_logits(made.logits)
    for logits, wanted in zip(found, expected(path), strict=True):
        torch.testing.assert_close(logits, wanted, **TOLERANCE)


def test_a_killed_rank_is_replaced_by_copies_and_comes_back(saved):
    path = saved("mixtral")
    wanted = expected(path)
    with ranks(path, expert_parallel_size=3, expert_replicas=2) as made:
        os.kill(made.processes.state()["processes"]["1"], signal.SIGKILL)
        for logits, one in zip(all_logits(made.logits), wanted, strict=True):
            torch.testing.assert_close(logits, one, **TOLERANCE)
        assert not made.group.take_losses().tokens
        made.until(lambda state: state["restarts"] == 1 and not state["masked"])
        assert made.group.num_masked == 1
        for logits, one in zip(all_logits(made.logits), wanted, strict=True):
            torch.testing.assert_close(logits, one, **TOLERANCE)


def test_a_stopped_rank_is_masked_and_continues(saved):
    path = saved("mixtral")
    wanted = expected(path)
    with ranks(path, expert_parallel_size=2, expert_replicas=2) as made:
        pid = made.processes.state()["processes"]["1"]
        os.kill(pid, signal.SIGSTOP)
        try:
            for logits, one in zip(all_logits(made.logits), wanted, strict=True):
                torch.testing.assert_close(logits, one, **TOLERANCE)
            assert "no sign of life" in made.processes.state()["masked"]["1"]
        finally:
            os.kill(pid, signal.SIGCONT)
        made.until(lambda state: not state["masked"])
        for logits, one in zip(all_logits(made.logits), wanted, strict=True):
            torch.testing.assert_close(logits, one, **TOLERANCE)
        assert made.processes.state()["restarts"] == 0
