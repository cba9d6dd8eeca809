"""Speculation between real nodes: a draft model whose KV of the prompt is never there, and n-grams.

The prefill node pushes the target's KV of a prompt to the decode node, from its own cache or newly computed. Nobody
computes the draft's: the decode node computes it between its decode steps (engine/speculation/draft.py), with warm
prompts too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from engine.checkpoint.model_source import describe
from engine.config.config import EMBEDDED_MODEL
from engine.text.tokenizer import Tokenizer
from lab.ablations.common.ablation import Ablation, Estimated
from lab.ablations.common.evidence import relative, told
from lab.ablations.common.metrics import metric, metrics
from lab.ablations.live.case import LiveCase, Look, Workload, nothing
from lab.ablations.live.play import Played, one_by_one
from lab.bench.common.client import Unreachable
from lab.bench.common.workload import Spec
from lab.drafts.cut import ABOUT, Recipe, about, made, path_of
from lab.launch import rest

RECIPE = Recipe()
DRAFTED = 4
PASSAGE_TOKENS, ANSWER_TOKENS, RATE_S = 640, 64, 0.5
PAGES = ("operations", "store", "request", "failures", "connect", "experts", "long-prompts", "launchers")
"""Of docs/: the text that the questions are about."""

QUESTIONS = (
    "Summarise this text in a few sentences.",
    "Explain this text to somebody who has never heard of it.",
    "List the most important points of this text.",
    "Write three questions about this text, and answer them.",
    "Rewrite this text in simpler words.",
)
WARM_PASSAGES = 2
PLAIN, NGRAMS, DRAFT = "no drafts", "n-grams", "draft model"
COLD, WARM = "cold", "warm"


def flags(method: str) -> tuple[str, ...]:
    fixed = ("--num-speculative-tokens", str(DRAFTED), "--speculative-length", "fixed")
    if method == NGRAMS:
        return ("--speculative-method", "ngram", *fixed)
    if method == DRAFT:
        model = str(path_of(RECIPE))
        return ("--speculative-method", "draft", "--speculative-model", model, "--speculative-kv-bytes", "64M", *fixed)
    return ()


@lru_cache(maxsize=1)
def tokenizer() -> Tokenizer:
    return Tokenizer.load(describe(EMBEDDED_MODEL))


@lru_cache(maxsize=1)
def passages() -> list[str]:
    """Pieces of about PASSAGE_TOKENS tokens of the pages, in their order."""
    folder = Path(__file__).resolve().parents[3] / "docs"
    pages = [tokenizer().encode((folder / f"{page}.md").read_text()) for page in PAGES]
    cut = [page[at : at + PASSAGE_TOKENS] for page in pages for at in range(0, len(page), PASSAGE_TOKENS)]
    return [tokenizer().decode(piece) for piece in cut if len(piece) == PASSAGE_TOKENS]


def prompt(passage: str, question: str) -> list[int]:
    return tokenizer().chat([{"role": "user", "content": f"{passage}\n\n{question}"}])


def asked(kv: str, seed: int, seconds: float) -> list[Spec]:
    """RATE_S questions per second: each about a passage of its own (cold), or about one of WARM_PASSAGES (warm)."""
    rng, texts = Random(seed), passages()
    count = max(1, round(RATE_S * seconds))
    fresh = rng.sample(texts[WARM_PASSAGES:], min(count, len(texts) - WARM_PASSAGES))
    if kv == COLD and len(fresh) < count:
        raise ValueError(f"{count} questions need as many passages, and there are {len(fresh)}: lower --seconds")
    about_ = fresh if kv == COLD else [rng.choice(texts[:WARM_PASSAGES]) for _ in range(count)]
    return [
        Spec(prompt(text, rng.choice(QUESTIONS)), ANSWER_TOKENS, index / RATE_S) for index, text in enumerate(about_)
    ]


def workload(kv: str) -> Workload:
    return Workload(f"questions about texts, {kv}", lambda seed, seconds: asked(kv, seed, seconds))


def make_draft() -> None:
    """Raises ModelError, OSError."""
    made(RECIPE, lambda line: print(line, file=sys.stderr))


def look(kv: str) -> Look:
    """Before the requests, the warm passages are asked about once; afterwards, what the nodes drafted and kept. Raises
    RestError, Unreachable."""

    def begin(urls: Sequence[str]) -> Callable[[Played], dict[str, float]]:
        if kv == WARM:
            for text in passages()[:WARM_PASSAGES]:
                for outcome in one_by_one(urls[0], [Spec(prompt(text, QUESTIONS[0]), 2)]):
                    if outcome.error is not None:
                        raise Unreachable(f"a warm passage was not computed: {outcome.error}")
        before = counted(urls)

        def figures(played: Played) -> dict[str, float]:
            after = counted(urls)
            done = [one.e2e_s for one in played.outcomes if one.error is None]
            found = per_step({name: after[name] - before[name] for name in after}, len(done))
            return found | {"answer_s": fmean(done)} | draft_shares(played.config or {})

        return figures

    return begin


def draft_shares(config: Mapping[str, Any]) -> dict[str, float]:
    """The parameters of a node's draft model, and its KV of a token, over the target's, if scripts/tools.py cut-draft
    made it and it is on this machine. Its layers have as much KV as the target's. Raises ModelError."""
    directory = config.get("speculative_model")
    if not directory or not (Path(directory) / ABOUT).is_file():
        return {}
    said = about(Path(directory))
    layers = describe(said["model"]).config.num_layers
    return {"draft_size": float(said["size"]), "draft_kv_share": said["layers"] / layers}


COUNTS = ("decode_rows", "draft_tokens", "accepted_tokens")
"""Of /debug/state. Rows without a draft count too, as in scripts/bench.py speculative: the simulator applies the means
to every decode step."""


def counted(urls: Sequence[str]) -> dict[str, int]:
    """What these nodes have decoded and drafted since their start, and the tokens of prompts that their draft models
    computed. Raises RestError."""
    total = dict.fromkeys((*COUNTS, "prompt_tokens"), 0)
    for url in urls:
        engine: dict[str, Any] = rest.get(f"{url}/debug/state").get("engine") or {}
        for name in COUNTS:
            total[name] += (engine.get("speculation") or {}).get(name, 0)
        total["prompt_tokens"] += (engine.get("draft_model") or {}).get("prompt_tokens", 0)
    return total


def per_step(counts: dict[str, int], requests: int) -> dict[str, float]:
    """Means over all decode steps of requests; nothing for nodes that do not speculate."""
    rows, drafted = counts["decode_rows"], counts["draft_tokens"]
    if not rows:
        return {}
    found = {
        "drafted": drafted / rows,
        "kept": 1 + counts["accepted_tokens"] / rows,
        "draft_prompt_tokens": counts["prompt_tokens"] / requests,
    }
    return found | ({"acceptance": counts["accepted_tokens"] / drafted} if drafted else {})


def label(kv: str, method: str) -> str:
    return f"{kv}, {method}"


def reading(values: dict[str, dict[str, Estimated]]) -> str:
    said = []
    for kv in (COLD, WARM):
        plain = label(kv, PLAIN)
        gains = ", ".join(
            f"{relative(values, 'mean TPOT, ms', label(kv, method), plain)} with {method}, which keep "
            f"{told(values[label(kv, method)]['kept per step'], '.2f')} tokens a step"
            for method in (NGRAMS, DRAFT)
        )
        said.append(f"{kv} prompts {gains}")
    computed = told(values[label(WARM, DRAFT)]["draft KV, tokens per request"], ".0f")
    found = told(values[label(WARM, DRAFT)]["hit rate"], ".0%")
    return (
        f"Time per token against no drafts: {'; '.join(said)}. With warm prompts the target's KV of {found} of the "
        f"tokens is found, and the draft model computes {computed} tokens of each prompt."
    )


SPECULATIVE = Ablation(
    "speculative",
    "What do drafts gain between nodes, with cold and with warm KV?",
    f"1P+1D, a core each; {RATE_S:g} questions/s about texts of {PASSAGE_TOKENS} tokens, answers of {ANSWER_TOKENS}, "
    f"at most {DRAFTED} drafts per step; cold: every text is new; warm: {WARM_PASSAGES} texts, asked about before. "
    f"The draft model is the first {RECIPE.layers} layers of the target with an output layer of its own, trained on "
    "text that the target wrote (scripts/tools.py cut-draft); its size and its KV are shares of the "
    "target's parameters and KV.",
    lambda requests: [
        LiveCase(
            *(label(kv, method), workload(kv), "prefill=1,decode=1", flags(method)),
            look=look(kv),
            prepare=make_draft if method == DRAFT else nothing,
        )
        for kv in (COLD, WARM)
        for method in (PLAIN, NGRAMS, DRAFT)
    ],
    metrics("mean TPOT, ms", "mean TTFT, s", "mean longest gap, ms", "hit rate")
    | {
        "mean answer, s": metric("answer_s"),
        "drafts per step": metric("drafted"),
        "kept per step": metric("kept"),
        "acceptance": metric("acceptance"),
        "draft KV, tokens per request": metric("draft_prompt_tokens"),
        "draft size": metric("draft_size"),
        "draft KV share": metric("draft_kv_share"),
    },
    reading,
)
