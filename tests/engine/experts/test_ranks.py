"""Experts on several ranks: real processes, one tiny model of each family, the same tokens as one process."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from engine.experts.placing.placement import Placement, imbalance
from engine.experts.processes import ExpertProcesses
from engine.model.decoder import Model, Outside
from engine.step.runner import Row, Runner
from net.rounds.desk import Desk
from net.rounds.silence import ANSWERS, LEAST_ANSWER_S
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
            self.model = Model(source.config, weights, choose("torch", "cpu"), outside=Outside(experts=self.group))
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


@pytest.mark.parametrize(
    ("family", "size"),
    [
        ("mixtral", 2),
        ("qwen3moe", 2),
        pytest.param("qwen3moe", 3, marks=[pytest.mark.heavy]),
        ("deepseek3", 4),
        ("gpt-oss", 2),
    ],
)
def test_the_same_as_one_process(saved, family, size):
    path = saved(family)
    with ranks(path, expert_parallel_size=size) as made:
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


def test_a_hung_rank_is_masked_by_the_length_of_its_rounds_and_continues(saved, tmp_path, monkeypatch):
    """It beats all the time, and does not answer."""
    file = tmp_path / "hangs"
    monkeypatch.setenv("HANGS_WHILE", str(file))
    monkeypatch.setattr("engine.experts.processes.WORKER", "tests.engine.experts.hanging_worker")
    path = saved("mixtral")
    wanted = expected(path)
    with ranks(path, expert_parallel_size=2, expert_replicas=2) as made:
        all_logits(made.logits)
        rounds = made.group._collector.silence._rounds
        limits = {f"{max(LEAST_ANSWER_S, ANSWERS * longest):.1f}" for longest in rounds.values()}
        file.touch()
        for logits, one in zip(all_logits(made.logits), wanted, strict=True):
            torch.testing.assert_close(logits, one, **TOLERANCE)
        why = made.processes.state()["masked"]["1"]
        limit = re.fullmatch(r"it lives and does not answer within (.*) s", why)
        assert limit is not None and limit[1] in limits
        file.unlink()
        made.until(lambda state: not state["masked"])
        for logits, one in zip(all_logits(made.logits), wanted, strict=True):
            torch.testing.assert_close(logits, one, **TOLERANCE)
        assert made.processes.state()["restarts"] == 0 and made.group.num_masked == 1


def test_a_rank_that_comes_back_while_no_step_runs_is_left_alone_unless_it_hangs(saved, monkeypatch):
    monkeypatch.setattr("engine.experts.processes.HUNG_S", 2.0)
    with ranks(saved("mixtral"), expert_parallel_size=2, expert_replicas=2) as made:
        kill(made, 1)
        made.group.died(1)  # as the watcher will say
        made.group.begin()
        assert made.group.masked
        wait_for(lambda: made.processes.restarts == 1 and not made.processes.missing())
        pid = made.processes.state()["processes"]["1"]
        time.sleep(5)  # several looks of its watcher
        assert made.processes.state()["processes"]["1"] == pid and made.processes.restarts == 1
        os.kill(pid, signal.SIGSTOP)
        wait_for(lambda: made.processes.restarts == 2 and not made.processes.missing())
        made.until(lambda state: not state["masked"])
        made.logits(tokens(40))
        assert made.processes.restarts == 2 and made.group.num_masked == 1


def wait_for(ready: Callable[[], bool], timeout_s: float = 120.0) -> None:
    """Without a step."""
    deadline = time.monotonic() + timeout_s
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("rule", ["fail", "drop", "wait"])
def test_experts_without_a_copy_are_lost_by_the_chosen_rule(saved, rule):
    path = saved("mixtral")
    with ranks(path, expert_loss=rule) as made:
        kill(made, 1)
        made.processes.group.died(1)  # as the watcher will say
        found = all_logits(made.logits)
        losses = made.group.take_losses()
        if rule == "wait":  # the process is started again, and loads from the checkpoint: nothing is missing
            for logits, wanted in zip(found, expected(path), strict=True):
                torch.testing.assert_close(logits, wanted, **TOLERANCE)
            assert not losses.tokens and made.group.num_dropped == 0
            assert made.processes.restarts == 1
            return
        assert losses.masked == (1,) and losses.tokens
        rows = losses.by_row([0], [105])
        assert rows[0].fails == (rule == "fail") and rows[0].dropped == sum(losses.tokens.values())
        assert made.group.num_dropped >= rows[0].dropped
        made.until(lambda state: not state["masked"])
        for logits, wanted in zip(all_logits(made.logits), expected(path), strict=True):
            torch.testing.assert_close(logits, wanted, **TOLERANCE)


def kill(made: Ranks, rank: int) -> None:
    os.kill(made.processes.state()["processes"][str(rank)], signal.SIGKILL)


def test_the_weights_of_the_other_experts_keep_their_sum(saved):
    """Of a token that lost one of its two experts, the other one counts fully: Mixtral's weights sum to one."""
    path = saved("mixtral")
    with ranks(path, expert_loss="drop") as made:
        layer = made.model.layers[0].mlp
        x = torch.randn(40, 96)
        weights, chosen = layer.router(x)
        here = made.group.placement.layers[0][0]
        kill(made, 1)
        made.group.died(1)
        made.group.begin()
        found = layer(x)
        for token, (of_token, row) in enumerate(zip(chosen.tolist(), found, strict=True)):
            kept = [(w, e) for w, e in zip(weights[token], of_token, strict=True) if e in here]
            share = made.processes.shares[0]
            alone = sum(w * share.expert(0, here.index(e), x[token : token + 1])[0] for w, e in kept)
            wanted = alone / sum(w for w, _ in kept) if kept else torch.zeros(96)
            torch.testing.assert_close(row, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "most"), [("int8", 127), ("fp8", 448)])
def test_coded_rows_are_close_and_the_same_on_every_rank(saved, kind, most):
    path = saved("qwen3moe")
    with ranks(path, expert_dispatch_dtype=kind) as made:
        layer, x = made.model.layers[1].mlp, torch.randn(30, 96)
        weights, chosen = layer.router(x)

        def by_hand(rows: Tensor) -> Tensor:
            out = torch.zeros(rows.shape)
            for token, experts in enumerate(chosen.tolist()):
                for weight, expert in zip(weights[token], experts, strict=True):
                    rank, slot = made.group.placement.holders(1, expert)[0]
                    out[token] += weight * made.processes.shares[rank].expert(1, slot, rows[token : token + 1])[0]
            return out

        coded = layer(x)
        error = (coded - by_hand(x)).norm() / by_hand(x).norm()
        assert 0 < error < (0.02 if kind == "int8" else 0.06)
        scale = x.abs().amax(1, keepdim=True) / most
        sent = (x / scale).round() if kind == "int8" else (x / scale).to(torch.float8_e4m3fn).float()
        torch.testing.assert_close(coded, by_hand(sent * scale), rtol=1e-3, atol=1e-3)


def test_experts_move_while_the_model_computes(saved):
    path = saved("qwen3moe")
    wanted = expected(path)
    with ranks(path, expert_parallel_size=2, num_redundant_experts=2, expert_balance_steps=2) as made:
        made.group.counts[:] = torch.tensor([900, 5, 5, 800, 5, 5])
        before = made.group.placement
        for logits, one in zip(all_logits(made.logits), wanted, strict=True):
            torch.testing.assert_close(logits, one, **TOLERANCE)
        made.group.begin()  # looks at the last layer
        made.group.balance = None
        assert made.group.num_moved > 0
        after = made.group.placement
        assert after != before
        loads = [900, 5, 5, 800, 5, 5]
        assert all(imbalance(layer, loads) < imbalance(before.layers[0], loads) for layer in after.layers)
        kill(made, 1)  # its successor takes the moved experts from where they are now
        made.until(lambda state: state["restarts"] == 1 and not state["masked"])
        for logits, one in zip(all_logits(made.logits), wanted, strict=True):
            torch.testing.assert_close(logits, one, **TOLERANCE)


class OneMove:
    """In place of Balance: the next step begins with this move."""

    def __init__(self, layer: int, placement: Placement) -> None:
        self.moves = [(layer, placement)]

    def next(self, counts: Tensor, placement: Placement) -> tuple[int, Placement] | None:
        return self.moves.pop() if self.moves else None


def test_a_rank_that_dies_while_others_move_experts_begins_where_they_end(saved, monkeypatch):
    path = saved("mixtral")
    with ranks(path, expert_parallel_size=3, expert_replicas=2) as made:
        group, shares, before = made.group, made.processes.shares, made.group.placement
        layers = range(len(before.layers))
        weights = [
            {e: shares[r].gate_up[i, s].clone() for r, slots in enumerate(of_ranks) for s, e in enumerate(slots)}
            for i, of_ranks in enumerate(before.layers)
        ]
        first, second, third = before.layers[0]
        mine = next(e for e in first if e not in second and e in third)  # the process of rank 2 copies it from rank 0
        other = next(e for e in second if e not in first and e in third)
        swapped = [tuple({mine: other, other: mine}.get(e, e) for e in slots) for slots in (first, second)]
        group.balance = OneMove(0, before.with_layer(0, [*swapped, third]))
        wait = group._collector.wait

        def kill_and_wait(desks: Mapping[int, Desk], asked: Sequence[int], work: int = 0) -> dict[int, str]:
            monkeypatch.undo()
            kill(made, 2)
            wait_for(lambda: made.processes.restarts == 1)
            time.sleep(0.5)  # for a process that would begin too early
            return wait(desks, asked)

        monkeypatch.setattr(group._collector, "wait", kill_and_wait)
        made.until(lambda state: state["restarts"] == 1 and not state["masked"])
        assert group.num_moved == 2 and group.placement.layers[0] == (*swapped, third)
        for layer in layers:
            for share, experts in zip(shares.values(), group.placement.layers[layer], strict=True):
                for slot, expert in enumerate(experts):
                    assert torch.equal(share.gate_up[layer, slot], weights[layer][expert]), (layer, experts, slot)
        for logits, one in zip(all_logits(made.logits), expected(path), strict=True):
            torch.testing.assert_close(logits, one, **TOLERANCE)
