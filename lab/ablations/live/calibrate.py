"""The data to which a step model of running nodes is fitted: their recorded steps, and the latencies a client sees.
The steps are of requests of many sizes.

Steps        one prompt at a time from short to long, some after a known prefix; groups that decode together; then a
             part of the open-loop load that will be simulated, for mixed steps
The way in   time to first token of a lone request minus its steps: HTTP, placement, queues between threads
Contention   steps while another node of the machine computes, minus those of a node that computes alone
Hand-over    the gap after the first token of a lone request minus the later gaps; only with nodes of one role
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from lab.ablations.live.loads import VOCABULARY
from lab.ablations.live.play import one_by_one, play, warmed
from lab.bench.common.client import Outcome
from lab.bench.common.workload import SUFFIX, Spec, TokenSource
from lab.simulator.models.fit import Quality, fit_shared, quality
from lab.simulator.models.step_models import StepModel
from lab.simulator.models.steps import RecordedStep, read_steps, together

PROMPTS = (16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3000)
BEHIND = ((1024, 64), (1024, 256), (1024, 768), (2048, 64), (2048, 512))  # (known tokens, new tokens)
TOGETHER = ((2, 100), (2, 1200), (4, 300), (4, 900), (8, 60), (8, 500), (16, 200))  # (requests, tokens of each)
ANSWER_TOKENS = 6  # of lone requests
GROUP_TOKENS = 40  # of an answer in a group


@dataclass(frozen=True, slots=True)
class Calibrated:
    """The model, and how well it reproduces the data it was fitted to."""

    model: StepModel
    contention: float  # SimConfig's
    quality: dict[str, Quality]
    load: list[Outcome]  # of the open loop


def alone(seed: int) -> list[Spec]:
    """Every size twice, and prompts whose beginning was sent before."""
    source = TokenSource(seed, VOCABULARY)
    made = [Spec(source.tokens(n, SUFFIX, 0, i, n), ANSWER_TOKENS) for n in PROMPTS for i in range(2)]
    for number, (known, new) in enumerate(BEHIND):
        first = source.tokens(known, SUFFIX, 1, number)
        made += [Spec(first, 1), Spec(first + source.tokens(new, SUFFIX, 2, number), ANSWER_TOKENS)]
    return made


def groups(seed: int) -> list[list[Spec]]:
    source = TokenSource(seed, VOCABULARY)
    return [
        [Spec(source.tokens(tokens, SUFFIX, 3, group, i), GROUP_TOKENS) for i in range(count)]
        for group, (count, tokens) in enumerate(TOGETHER)
    ]


def calibrate(
    urls: Sequence[str],
    files: Mapping[str, Path],
    base: StepModel,
    load: Sequence[Spec],
    seed: int,
    apart: bool,
    tell: Callable[[str], None],
) -> Calibrated:
    """files: the nodes' step recordings. load: open loop, with prompts that differ from the measured ones. apart:
    prefill and decode run on separate nodes. Raises ValueError, OSError, Unreachable."""
    tell("one request after the other")
    warmed(urls)
    since = max((step.begin for step in recorded(files)), default=0.0)
    singles = one_by_one(urls[0], alone(seed))
    for number, group in enumerate(groups(seed)):
        tell(f"group {number + 1} of {len(TOGETHER)}")
        play(urls, group)
    tell(f"{len(load)} requests in open loop")
    played = play(urls, load)
    steps = [step for step in recorded(files) if step.begin > since]
    model, contention = fit_shared(base, steps)
    front_s, handover_s = way_in(singles, steps), hand_over(singles) if apart else 0.0
    return Calibrated(
        replace(model, front_s=front_s, handover_s=handover_s),
        contention,
        quality(model, contention, steps),
        played.outcomes,
    )


def recorded(files: Mapping[str, Path]) -> list[RecordedStep]:
    """The steps of all nodes, which share this machine's clock."""
    return together([read_steps(path) for path in files.values()])


def way_in(singles: Sequence[Outcome], steps: Sequence[RecordedStep]) -> float:
    """Median over lone requests, seconds. Raises ValueError when none succeeded."""
    found = []
    for one in singles:
        if one.error is None:
            end = one.sent_s + one.ttft_s
            own = sum(step.seconds for step in steps if one.sent_s <= step.begin < end and step.chunks)
            found.append(one.ttft_s - own)
    if not found:
        raise ValueError(f"no request of the calibration succeeded: {singles[0].error}")
    return max(0.0, median(found))


def hand_over(singles: Sequence[Outcome]) -> float:
    """Median seconds over lone requests; 0 if the answers are too short to measure it."""
    gaps = [one.itl_s[0] - median(one.itl_s[1:]) for one in singles if one.error is None and len(one.itl_s) > 2]
    return max(0.0, median(gaps)) if gaps else 0.0
