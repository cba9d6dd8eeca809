"""The load of an engine: sums over its requests that each probe of a burst can afford.

tests/engine/core/test_batcher_machine.py compares the kept sums with new ones after every event of a batcher."""

from __future__ import annotations

from cache.block import BlockGeometry
from cache.keys import root_key
from cache.pool.block_pool import BlockPool
from engine.config.config import Config
from engine.core.batcher import Batcher
from engine.core.costs import StepCosts
from engine.core.engine_load import COMPARED_PROMPTS, EngineLoad
from engine.sampling.params import SamplingParams
from engine.step.request import Request
from sched.gossip.load_word import STAGES

SIZE = 4
ROOT = root_key("toy", BlockGeometry(1, 1, 2, SIZE, "float32"))
CONFIG = Config(block_size=SIZE, max_num_seqs=8, max_num_batched_tokens=64)


def loaded() -> tuple[Batcher, EngineLoad]:
    batcher = Batcher(BlockPool(4096), SIZE, 8, 64, 256, {0})
    return batcher, EngineLoad(CONFIG, batcher, StepCosts())


def prompt(name: object, tokens: list[int]) -> Request:
    return Request(str(name), tokens, len(tokens), SamplingParams(max_tokens=4), 0.0, ROOT)


def test_a_burst_of_prompts_is_counted_once_however_often_the_load_is_asked_for(monkeypatch):
    counted = 0
    features = StepCosts.left_features

    def counting(*arguments: object) -> tuple[float, float, float]:
        nonlocal counted
        counted += 1
        return features(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(StepCosts, "left_features", counting)
    batcher, load = loaded()
    for number in range(100):
        batcher.add(0.0, prompt(number, [number + 1] * 9))
        for _ in range(3):
            assert load.record().waiting == number + 1
        assert load.record().queued_tokens == 9 * (number + 1)
    assert counted == 100


def test_the_load_says_whether_the_node_can_be_a_stage():
    _, load = loaded()
    for able in (False, True):
        load.stages = able
        assert bool(load.record().flags & STAGES) == bool(load.word().flags & STAGES) == able


def test_a_step_changes_the_load():
    batcher, load = loaded()
    for number in range(10):
        batcher.add(0.0, prompt(number, [number + 1] * 9))
    before = load.record()
    step = batcher.schedule(1.0)
    assert step is not None and load.record().running == len(step.rows)
    batcher.commit(1.0, step, [[5] if row.samples else None for row in step.rows])
    after = load.record()
    assert after.queued_tokens == before.queued_tokens - step.num_tokens and after.work_s < before.work_s
    assert load.word().waiting_standard == before.waiting - len(step.rows)


def test_a_prompt_costs_less_behind_one_that_computes_its_beginning():
    batcher, load = loaded()
    alone = load.prefill_s(prompt("a", [7] * 64))
    batcher.add(0.0, prompt("b", [7] * 64))
    assert load.prefill_s(prompt("a", [7] * 64)) < alone / 2
    one = load.record().work_s
    batcher.add(0.0, prompt("c", [7] * 64))
    assert load.record().work_s < 1.5 * one


def test_only_the_first_prompts_of_a_long_queue_are_compared():
    batcher, load = loaded()
    for number in range(COMPARED_PROMPTS):
        batcher.add(0.0, prompt(number, [number + 1] * 9))
        load.record()
    alone = load.prefill_s(prompt("a", [200] * 64))
    batcher.add(0.0, prompt("late", [200] * 64))
    assert load.prefill_s(prompt("a", [200] * 64)) == alone
