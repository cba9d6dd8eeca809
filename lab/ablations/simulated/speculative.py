"""Speculative decoding with prompts found in the pool, and without. What a step drafts and keeps was measured."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from lab.ablations.common.ablation import Ablation, Case, Estimated, Workload
from lab.ablations.common.evidence import relative
from lab.ablations.common.looks import answer_times
from lab.ablations.common.metrics import metric
from lab.docs.figures import RESULTS, Result
from lab.simulator.config import SimConfig
from lab.simulator.models.speculation import kept_tokens, verifying
from lab.simulator.models.step_models import LLAMA3_8B, LLAMA3_70B, PRESETS

RESULT, LIVE_RESULT = "speculative", "speculative-live"
"""The benchmark and the live ablation whose newest results tell the acceptance."""

MEASURED = re.compile(r"(\w+) x(\d+) (ngram|draft) auto")
"""A case of it: the kind of prompts, requests of a batch, the method. `auto`: the length of drafts follows their
acceptance, as nodes do by default."""

SIZE, KV_SHARE = LLAMA3_8B.parameters / LLAMA3_70B.parameters, LLAMA3_8B.token_bytes / LLAMA3_70B.token_bytes
"""Of the 8B shape over the target: parameters, and KV bytes of a token."""

ASSUMED = {"n-grams": (0.3, 0.0, 0.0), "draft model": (0.7, SIZE, KV_SHARE)}
"""Sensitivity: (acceptance of each of DRAFTED tokens, parameters and KV over the target's)."""

DRAFTED = 4
PLAIN = "no drafts"
METHODS = {"ngram": "n-grams", "draft": "draft model"}
KV = {"cold": SimConfig(cache_blocks=0), "warm": SimConfig(pool_blocks=6000)}


@dataclass(frozen=True, slots=True)
class Drafts:
    """Of a request, per step: drafted tokens, kept tokens. `size`, `kv_share`: the draft model's parameters, and its KV
    of a token, over the target's."""

    drafted: float
    kept: float
    size: float
    kv_share: float


@lru_cache
def measured(folder: Path = RESULTS) -> tuple[str, dict[str, Drafts]]:
    """(the file, drafts by name) of the largest batch of each kind of prompts and method. Raises LookupError if nobody
    has measured any."""
    result, largest = Result.newest(RESULT, folder), dict[tuple[str, str], int]()
    named = {case: match.groups() for case in result.cases(".*") if (match := MEASURED.fullmatch(case))}
    for kind, batch, method in named.values():
        largest[kind, method] = max(int(batch), largest.get((kind, method), 0))
    found: dict[str, Drafts] = {}
    for case, (kind, batch, method) in named.items():
        drafted = result.row(case, "drafts per row and step")["ours"]
        kept = result.row(case, "tokens per row and step")["ours"]
        if int(batch) == largest[kind, method]:
            found[f"{METHODS[method]} as measured, {kind}"] = Drafts(drafted, kept, *ASSUMED[METHODS[method]][1:])
    if not found:
        raise LookupError(f"{result.path.name} has no row of a measured acceptance")
    return result.path.name, found


@lru_cache
def between_nodes(folder: Path = RESULTS) -> tuple[str, dict[str, dict[str, Drafts]]]:
    """(the file, drafts by name for cold and for warm KV) as `scripts/ablate.py speculative --live` measured them; a
    draft model has the size and the KV that it had there. ("", nothing) if nobody has. Raises LookupError for a result
    without a row that it should have."""
    try:
        result = Result.newest(LIVE_RESULT, folder)
    except LookupError:
        return "", {kv: {} for kv in KV}
    found: dict[str, dict[str, Drafts]] = {}
    for kv in KV:
        found[kv] = {}
        for method in METHODS.values():
            names = "drafts per step", "kept per step", "draft size", "draft KV share"
            drafted, kept, size, share = (result.row(f"{kv}, {method}", name)["ours"] for name in names)
            found[kv][f"{method} between nodes"] = Drafts(drafted, kept, size or 0.0, share or 0.0)
    return result.path.name, found


def drafts(kv: str) -> dict[str, Drafts]:
    """All kinds of drafts with cold or warm KV: measured ones, then assumed ones."""
    assumed = {
        f"{name}, assumed {acceptance:.0%}": Drafts(DRAFTED, kept_tokens(DRAFTED, acceptance), *of)
        for name, (acceptance, *of) in ASSUMED.items()
    }
    return measured()[1] | between_nodes()[1][kv] | assumed


def cases(requests: int | None) -> list[Case]:
    work, model = Workload("conversation", min(requests or 6000, 6000)), PRESETS["llama3-70b-8xa800"]
    made = []
    for kv, config in KV.items():
        made.append(Case(f"{kv}, {PLAIN}", config, work, look=(answer_times,)))
        for name, one in drafts(kv).items():
            speculates = verifying(model, one.drafted, one.kept, one.size, one.kv_share)
            made.append(Case(f"{kv}, {name}", config, work, model=speculates, look=(answer_times,)))
    return made


def reading(values: dict[str, dict[str, Estimated]]) -> str:
    said = []
    for kv in KV:
        gains = [
            f"{relative(values, 'mean answer, s', f'{kv}, {name}', f'{kv}, {PLAIN}')} with {name}"
            for name in drafts(kv)
        ]
        said.append(f"{kv} KV {' and '.join(gains)}")
    warm = relative(values, "mean answer, s", f"warm, {PLAIN}", f"cold, {PLAIN}")
    sources = " and ".join(filter(None, (measured()[0], between_nodes()[0])))
    steps = "; ".join(
        f"{kv} KV, {name} {one.drafted:.2f} and {one.kept:.2f}" for kv in KV for name, one in drafts(kv).items()
    )
    return (
        f"Time from arrival to the last token against no drafts: {', '.join(said)}. Warm KV instead of cold, without "
        f"drafts: {warm}. Drafts as measured are those of {sources}, on another model than the simulated one; "
        f"the assumed ones show how much depends on them. Tokens of a request that a step drafts and keeps: {steps}."
    )


SPECULATIVE = Ablation(
    "speculative",
    "What do drafts gain with cold and with warm KV?",
    "8P+8D, conversation trace; cold = no node keeps KV. N-grams are free. A draft model runs on "
    "the decode nodes, which compute its KV of every prompt, and read it for each drafted token; between nodes it has "
    "its measured shares of the target's parameters and KV, else those of the 8B shape.",
    cases,
    {
        "mean answer, s": metric("answer_s"),
        "mean TTFT, s": metric("ttft_s", "mean"),
        "mean TBT, ms": metric("tbt_s", "mean", 1000),
    },
    reading,
)
