"""Disaggregation against chunked prefill on mixed nodes, fairly: the chunk size is swept."""

from __future__ import annotations

from scripts.lab.ablation import Ablation, Case, Estimated, Workload, metric
from sim.config import SimConfig

CHUNKS = (512, 1024, 2048, 4096, 8192)


def cases(requests: int | None) -> list[Case]:
    work = Workload("conversation", min(requests or 4000, 4000))
    made = [Case("8P+8D", SimConfig(pool_blocks=6000), work, 30.0, 0.1)]
    for chunk in CHUNKS:
        config = SimConfig(prefill=0, decode=0, mixed=16, chunk_tokens=chunk, pool_blocks=6000)
        made.append(Case(f"16 mixed, chunk {chunk}", config, work, 30.0, 0.1, "16 mixed", chunk))
    both = SimConfig(prefill=4, decode=4, mixed=8, chunk_tokens=2048, pool_blocks=6000)
    return [*made, Case("4P+4D+8 mixed", both, work, 30.0, 0.1)]


def reading(values: dict[str, dict[str, Estimated]]) -> str:
    best = max(CHUNKS, key=lambda chunk: values[f"16 mixed, chunk {chunk}"]["effective"].mean)
    split, mixed = values["8P+8D"], values[f"16 mixed, chunk {best}"]
    gap = "p99 longest gap, ms"
    return (
        f"The best chunk is {best}: {mixed['effective'].mean:.1%} effective at a p99 gap of {mixed[gap].mean:.0f} ms; "
        f"split nodes reach {split['effective'].mean:.1%} at {split[gap].mean:.0f} ms. Who wins depends on the limit."
    )


COLOCATED = Ablation(
    "colocated",
    "Is disaggregation better than well-tuned chunked prefill?",
    "16 nodes, conversation trace; effective = TTFT <= 30 s and mean TBT <= 100 ms; the longest gap of a request shows "
    "the interference that a mean hides.",
    cases,
    {
        "effective": metric("goodput"),
        "mean TTFT, s": metric("ttft_s", "mean"),
        "mean TBT, ms": metric("tbt_s", "mean", 1000),
        "p99 longest gap, ms": metric("longest_gap_s", "p99", 1000),
    },
    reading,
)
