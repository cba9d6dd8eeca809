"""Disaggregation against chunked prefill on mixed nodes, fairly: the chunk size is swept, and mixed nodes may part."""

from __future__ import annotations

from dataclasses import replace

from lab.ablations.common.ablation import Ablation, Case, Estimated, Workload
from lab.ablations.common.evidence import best_of, leaders, points, relative, told
from lab.ablations.common.metrics import metrics
from lab.simulator.config import SimConfig

SPLIT = "8P+8D"
GAP = "p99 longest gap, ms"
CHUNKS = (512, 1024, 2048, 4096, 8192)
SHAPES = {"16 mixed": (0, 0, 16, False), "4P+4D+8 mixed": (4, 4, 8, False), "16 mixed with tolls": (0, 0, 16, True)}
"""Prefill, decode and mixed nodes, and whether tolls keep prompts and decodes of the mixed ones apart."""


def cases(requests: int | None) -> list[Case]:
    work = Workload("conversation", min(requests or 4000, 4000))
    made = [Case(SPLIT, SimConfig(pool_blocks=6000), work, 30.0, 0.1, tail_tbt=True)]
    for shape, (prefill, decode, mixed, tolls) in SHAPES.items():
        nodes = SimConfig(prefill=prefill, decode=decode, mixed=mixed, tolls=tolls, pool_blocks=6000)
        for chunk in CHUNKS:
            config = replace(nodes, chunk_tokens=chunk)
            label = f"{shape}, chunk {chunk}"
            made.append(Case(label, config, work, 30.0, 0.1, tail_tbt=True, series=shape, x=chunk))
    return made


def reading(values: dict[str, dict[str, Estimated]]) -> str:
    said = []
    for shape in SHAPES:
        chunks = {f"{shape}, chunk {chunk}": f"a chunk of {chunk}" for chunk in CHUNKS}
        best = leaders(values, "effective", list(chunks))[0]
        said.append(
            f"{shape}: by effective requests {best_of(values, 'effective', chunks)}; with {chunks[best]} "
            f"{told(values[best]['effective'], '.1%')}, p99 gap {told(values[best][GAP], '.0f', ' ms')}; against that "
            f"{SPLIT} {points(values, 'effective', SPLIT, best)}, gap {relative(values, GAP, SPLIT, best)}"
        )
    split = values[SPLIT]
    return (
        ". ".join(said)
        + f". {SPLIT} itself: {told(split['effective'], '.1%')}, {told(split[GAP], '.0f', ' ms')}. The paper's vLLM "
        "with chunked prefill has 9.4 %: it had no pool, no placement by cache and an unpublished chunk size."
    )


COLOCATED = Ablation(
    "colocated",
    "Is disaggregation better than well-tuned chunked prefill?",
    "16 nodes, conversation trace; effective = TTFT <= 30 s and TBT (mean of a request's longest tenth of gaps) <= 100 "
    "ms; every shape has its best chunk size.",
    cases,
    metrics("effective", "mean TTFT, s", "mean TBT, ms", "p99 longest gap, ms"),
    reading,
    {"8P+8D": 0.966},
    "FAST'25 Fig. 1, Mooncake at 100 ms",
    x_name="tokens of a chunk",
)
