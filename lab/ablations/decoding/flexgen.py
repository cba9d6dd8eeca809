"""FlexGen's published figures: a block of batches that shares each read of the weights, and one batch alone."""

from __future__ import annotations

from lab.ablations.common.ablation import Ablation, Estimated, Goal
from lab.ablations.common.evidence import Values, shown, told, weighted
from lab.ablations.common.metrics import metric
from lab.ablations.decoding.case import BlockCase
from lab.simulator.models.beyond import BlockOfBatches, Machine, Opt

PROMPT, OUTPUT = 512, 32
RATE = "tokens/s"

T4 = Machine(
    # 16 GB, 208 GB and the disk are FlexGen's (section 6); the other rates are assumptions about such a machine.
    flops=32e12,
    gpu_bytes=0.9 * 16e9,
    gpu_bytes_s=0.8 * 320e9,
    dram_bytes=0.9 * 208e9,
    pcie_bytes_s=12e9,
    read_bytes_s=2e9,
    write_bytes_s=1e9,
)
MODELS = {"OPT-6.7B": Opt(32, 4096), "OPT-30B": Opt(48, 7168), "OPT-175B": Opt(96, 12288)}
BLOCKS = {"OPT-6.7B": (2, 1), "OPT-30B": (48, 3), "OPT-175B": (32, 8)}
"""Batch size and number of batches. 2, 144 and 256 prompts together are FlexGen's own, of its table of batch sizes."""
ALONE = {"OPT-6.7B": 2, "OPT-30B": 8, "OPT-175B": 2}
"""Prompts of the baseline, Hugging Face Accelerate, which reads the weights again for each batch; of the same table."""
PUBLISHED = {"OPT-6.7B": (25.26, 25.12), "OPT-30B": (7.32, 0.62), "OPT-175B": (0.69, 0.01)}
"""Tokens/s with the block, and of the baseline."""
WITHIN = 2.0
"""A model of rates alone should be no further from the published figure."""


def block(model: str) -> str:
    return f"{model}, a block of {BLOCKS[model][1]} x {BLOCKS[model][0]}"


def alone(model: str) -> str:
    return f"{model}, one batch of {ALONE[model]}"


def cases(requests: int | None) -> list[BlockCase]:
    """The numbers of prompts are FlexGen's."""
    made = []
    for name, model in MODELS.items():
        made.append(BlockCase(block(name), BlockOfBatches(T4, model, *BLOCKS[name], PROMPT, OUTPUT)))
        made.append(BlockCase(alone(name), BlockOfBatches(T4, model, ALONE[name], 1, PROMPT, OUTPUT)))
    return made


def _gain(values: Values, model: str) -> str:
    """The block over one batch, if the intervals separate them."""
    ours, theirs = values[block(model)][RATE], values[alone(model)][RATE]
    if not theirs.mean or not shown(weighted((1.0, ours), (-1.0, theirs))):
        return "no difference shown from one batch"
    return f"{ours.mean / theirs.mean:.3g}x of one batch"


def reading(values: dict[str, dict[str, Estimated]]) -> str:
    said = [
        f"{name} {told(values[block(name)][RATE], '.3g')} (published {PUBLISHED[name][0]:g}), {_gain(values, name)} "
        f"(published {PUBLISHED[name][0] / PUBLISHED[name][1]:.3g}x)"
        for name in MODELS
    ]
    return (
        f"Tokens/s of a block: {'; '.join(said)}. The published 0.01 of the baseline for OPT-175B has one digit. Ours "
        "follow from rates alone: they leave out what FlexGen and the baseline lose to their own code, and one batch "
        "reads and computes at the same time here."
    )


def goals(values: dict[str, dict[str, Estimated]]) -> list[Goal]:
    """No chance is in the values, so the means decide."""
    made = []
    for name in MODELS:
        ratio = values[block(name)][RATE].mean / PUBLISHED[name][0]
        text = f"{name} by FlexGen's schedule: tokens/s over the published figure"
        met = 1 / WITHIN <= ratio <= WITHIN
        made.append(Goal(text, f"within {WITHIN:g}x", f"{ratio:.2f}x", met))
    return made


FLEXGEN = Ablation(
    "flexgen",
    "Does a model of rates alone find FlexGen's published figures of decode beyond memory?",
    f"Prompts of {PROMPT} tokens and answers of {OUTPUT} on one T4 with 208 GB of DRAM and a disk; generated tokens "
    "over all of the time, prefill included. Weights and KV lie in the fastest places with room. Cost: 1 per node and "
    "hour.",
    cases,
    {RATE: metric("tokens_s"), "cost per million tokens": metric("cost"), "node-hours": metric("node_hours")},
    reading,
    paper={block(name): of[0] for name, of in PUBLISHED.items()}
    | {alone(name): of[1] for name, of in PUBLISHED.items()},
    paper_source="FlexGen (arXiv 2303.06865), throughput on one T4; batch sizes and the baseline, Hugging Face "
    "Accelerate, of its published table of batch sizes",
    goals=goals,
)
