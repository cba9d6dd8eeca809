"""Speculative decoding with cached KV and with computed KV."""

from __future__ import annotations

from functools import lru_cache
from random import Random
from typing import TYPE_CHECKING

from lab.ablations.common.ablation import Estimated, metric, ratio
from lab.ablations.live.case import LiveAblation, LiveCase, Workload
from lab.bench.common.workload import Spec

if TYPE_CHECKING:
    from engine.text.tokenizer import Tokenizer

WORDS = [
    "harbour",
    "tide",
    "clock",
    "lantern",
    "bridge",
    "orchard",
    "kettle",
    "ladder",
    "window",
    "river",
    "market",
    "garden",
    "stone",
    "candle",
    "letter",
    "island",
    "morning",
    "winter",
    "sailor",
    "engine",
    "basket",
    "mirror",
    "thunder",
    "copper",
    "velvet",
    "meadow",
    "barrel",
    "anchor",
    "ribbon",
    "hammer",
]
SENTENCES, WORDS_EACH, ANSWER_TOKENS = 6, 9, 48
RATE = 0.8  # requests per second
NODES = "prefill+decode=1"


def prompts(seed: int, seconds: float) -> list[list[int]]:
    """Prompts that ask to repeat a text, so that n-gram lookup pays; no two are equal."""
    rng = Random(seed)
    made = []
    for number in range(max(2, round(RATE * seconds))):
        text = " ".join(" ".join(rng.choices(WORDS, k=WORDS_EACH)).capitalize() + "." for _ in range(SENTENCES))
        question = f"Text {seed}-{number}. Repeat the following text exactly, word for word:\n\n{text}"
        made.append(_tokenizer().chat([{"role": "user", "content": question}]))
    return made


def load(seed: int, seconds: float) -> list[Spec]:
    rng, at = Random(seed + 1), 0.0
    made = []
    for tokens in prompts(seed, seconds):
        at += rng.expovariate(RATE)
        made.append(Spec(tokens, ANSWER_TOKENS, at))
    return made


def seen(seed: int, seconds: float) -> list[Spec]:
    """The same prompts, so that their KV is cached."""
    return [Spec(tokens, 1) for tokens in prompts(seed, seconds)]


@lru_cache(maxsize=1)
def _tokenizer() -> Tokenizer:
    """Loaded only when prompts are needed, not for --list."""
    from engine.checkpoint.model_source import describe
    from engine.config.config import EMBEDDED_MODEL
    from engine.text.tokenizer import Tokenizer

    return Tokenizer.load(describe(EMBEDDED_MODEL))


COLD, WARM = Workload("cold", load), Workload("warm", load, seen)


def reading(values: dict[str, dict[str, Estimated]]) -> str:
    labels = {f"{method}, {heat}" for method in ("none", "ngram") for heat in ("cold", "warm")}
    if not labels <= set(values):
        return "These are running clusters with their own configuration."
    gains = {heat: ratio(values, "mean TPOT, ms", f"ngram, {heat}", f"none, {heat}") for heat in ("cold", "warm")}
    ttft = ratio(values, "mean TTFT, s", "none, warm", "none, cold")
    return (
        f"n-grams change the time per token to {gains['cold']:.2f}x with cold and {gains['warm']:.2f}x with warm KV: "
        f"warm KV shortens the time to the first token (to {ttft:.2f}x), drafts that to the others."
    )


SPECULATION = LiveAblation(
    "speculative",
    "Does speculative decoding still pay when the KV is warm?",
    f"One node, one core, greedy answers of {ANSWER_TOKENS} tokens that repeat a text of the prompt, {RATE} "
    "requests/s; warm = every prompt was sent once before, so that its blocks are in the arena; ngram = "
    "--speculative-method ngram.",
    tuple(
        LiveCase(f"{method}, {work.name}", work, NODES, ("--speculative-method", method))
        for work in (COLD, WARM)
        for method in ("none", "ngram")
    ),
    {
        "mean TPOT, ms": metric("tbt_s", "mean", 1000),
        "mean TTFT, s": metric("ttft_s", "mean"),
        "hit rate": metric("token_hit_rate"),
    },
    reading,
)
