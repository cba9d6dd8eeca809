"""Speculative decoding with cached KV and with computed KV."""

from __future__ import annotations

from functools import lru_cache
from random import Random
from typing import TYPE_CHECKING

from lab.ablations.common.ablation import Ablation, Estimated, ratio
from lab.ablations.common.metrics import metrics
from lab.ablations.live.case import LiveCase, Workload
from lab.bench.common.workload import Spec

if TYPE_CHECKING:
    from engine.text.tokenizer import Tokenizer

TEXT = (
    "harbour tide clock lantern bridge orchard kettle ladder window river market garden stone candle letter "
    "island morning winter sailor engine basket mirror thunder copper velvet meadow barrel anchor ribbon "
    "hammer"
)
WORDS = TEXT.split()
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
    gains = {heat: ratio(values, "mean TPOT, ms", f"ngram, {heat}", f"none, {heat}") for heat in ("cold", "warm")}
    ttft = ratio(values, "mean TTFT, s", "none, warm", "none, cold")
    return (
        f"n-grams change the time per token to {gains['cold']:.2f}x with cold and {gains['warm']:.2f}x with warm KV: "
        f"warm KV shortens the time to the first token (to {ttft:.2f}x), drafts that to the others."
    )


SPECULATION = Ablation(
    "speculative",
    "Does speculative decoding still pay when the KV is warm?",
    f"One node, one core, greedy answers of {ANSWER_TOKENS} tokens that repeat a text of the prompt, {RATE} "
    "requests/s; warm = every prompt was sent once before, so that its blocks are in the arena; ngram = "
    "--speculative-method ngram.",
    lambda requests: [
        LiveCase(f"{method}, {work.name}", work, NODES, ("--speculative-method", method))
        for work in (COLD, WARM)
        for method in ("none", "ngram")
    ],
    metrics("mean TPOT, ms", "mean TTFT, s", "hit rate"),
    reading,
)
