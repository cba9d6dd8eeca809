"""FAST'25 Fig. 9: the token hit rate of one global LRU cache by its size. It depends only on the order; nothing is
timed."""

from __future__ import annotations

from cache.pool.policies import policies
from lab.ablations.common.ablation import Workload, rows_of
from lab.caches.replay import replay
from lab.caches.targets import TOLERANCE
from lab.loads.trace import BLOCK_TOKENS

MTOKENS = (1, 2, 3, 5, 10, 50)
PAPER: dict[str, tuple[float | None, ...]] = {
    "conversation": (0.087, 0.120, None, 0.247, 0.326, 0.398),
    "toolagent": (0.386, 0.414, None, 0.505, 0.561, 0.595),
    "synthetic": (0.146, 0.235, None, 0.435, 0.589, 0.658),
}
"""Read off the figure; 3M tokens are printed as shares of the ceiling."""
OF_CEILING = {"conversation": 0.41, "toolagent": 0.75, "synthetic": 0.46}
ELSEWHERE: dict[str, tuple[float, ...]] = {
    "conversation": (0.054, 0.086, 0.139, 0.211, 0.291, 0.371),
    "synthetic": (0.145, 0.233, 0.315, 0.428, 0.577, 0.651),
}
"""Rates of the released traces, computed by another program (reference/papers.md)."""


def curves() -> dict[str, tuple[str, list[float], float]]:
    """Trace -> (origin of its requests, rates by MTOKENS, ceiling)."""
    found = {}
    for trace in PAPER:
        source, rows = rows_of(Workload(trace), 0)
        rates = [replay(rows, m * 1_000_000 // BLOCK_TOKENS, policies["lru"]()).total.token_rate for m in MTOKENS]
        found[trace] = source, rates, replay(rows, None, policies["lru"]()).total.token_rate
    return found


def disagreements(found: dict[str, tuple[str, list[float], float]]) -> list[str]:
    """Rates of released traces that differ from the other program's."""
    return [
        f"{trace}, {m}M tokens: {ours:.3f}, another program says {theirs:.3f}"
        for trace, known in ELSEWHERE.items()
        if not found[trace][0].startswith("generated")
        for m, ours, theirs in zip(MTOKENS, found[trace][1], known, strict=True)
        if abs(ours - theirs) > TOLERANCE
    ]


def section() -> str:
    """The report's section, Markdown."""
    found = curves()
    lines = [
        "## Hit rate by the size of the cache",
        "",
        "Tokens found over all tokens, one global LRU cache, cold at the start, blocks of 512 tokens. Requests: "
        + ", ".join(dict.fromkeys(source for source, _, _ in found.values()))
        + ".",
        "",
        "| million tokens | " + " | ".join(map(str, MTOKENS)) + " | no limit | 3M: share of that |",
        "|" + "---|" * (len(MTOKENS) + 3),
    ]
    for trace, (_, rates, ceiling) in found.items():
        cells = [*(f"{rate:.3f}" for rate in rates), f"{ceiling:.3f}", f"{rates[MTOKENS.index(3)] / ceiling:.0%}"]
        lines.append(f"| {trace} | " + " | ".join(cells) + " |")
        paper = ["" if rate is None else f"{rate:.3f}" for rate in PAPER[trace]]
        lines.append(f"| {trace}, paper | " + " | ".join([*paper, "", f"{OF_CEILING[trace]:.0%}"]) + " |")
    return "\n".join([*lines, "", "Paper: FAST'25 Fig. 9.", "", f"{agreement(found)} {distance(found)}", ""])


def agreement(found: dict[str, tuple[str, list[float], float]]) -> str:
    """Whether the rates of released traces are those of another program; these have no chance in them."""
    released = [trace for trace in ELSEWHERE if not found[trace][0].startswith("generated")]
    if not released:
        return "No released trace is here, so nothing is compared with another program's rates."
    wrong = disagreements(found)
    verdict = "; ".join(wrong) if wrong else f"agree with another program's to {TOLERANCE}"
    return f"The rates of released traces ({', '.join(released)}) {verdict}."


def distance(found: dict[str, tuple[str, list[float], float]]) -> str:
    """How far the rates are from the paper's."""
    said = []
    for trace, known in PAPER.items():
        off = [ours - paper for ours, paper in zip(found[trace][1], known, strict=True) if paper is not None]
        said.append(f"{trace} {min(off):+.3f} to {max(off):+.3f}")
    return (
        f"Ours less the paper's: {', '.join(said)}. The paper's conversation blocks had 256 tokens, which credit more "
        "of a system prompt that all requests share."
    )
