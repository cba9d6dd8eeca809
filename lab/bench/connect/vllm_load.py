"""The requests to each configuration of scripts/bench.py connect-vllm, and what is measured of the answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from lab.bench.common.client import open_session
from lab.bench.common.workload import TokenSource
from lab.foreign.common.completions import Answer, ask, complete

VOCABULARY = 49_152
QUESTION_TOKENS = 50
SETTLE_S = 3.0
"""After an answer its KV is stored in the background."""

WARM_UP, DOCUMENT, QUESTION, TURN = range(4)

Samples = dict[str, list[float]]
"""metric -> values"""

MISS, ELSEWHERE, AFTER_RESTART = "TTFT new prefix", "TTFT prefix of another process", "TTFT after a restart"
TURNS_PER_S, TURN_TTFT = "turns per second", "mean TTFT of a turn"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of one run. `rounds`: documents; `sessions` talk at the same time, each has `turns` turns."""

    document_tokens: int = 4000
    rounds: int = 5
    sessions: int = 8
    turns: int = 4
    first_tokens: int = 1500
    turn_tokens: int = 300
    answer_tokens: int = 32


class Load:
    """The same prompts for every configuration."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes, self._source = sizes, TokenSource(0, VOCABULARY)

    def warm_up(self, urls: Sequence[str]) -> None:
        """Raises Unreachable, like all methods."""
        for number, url in enumerate(urls):
            for length in (64, 600):
                ask(url, self._source.tokens(length, WARM_UP, number, length), 8)

    def documents(self, urls: Sequence[str]) -> Samples:
        """Each document is new to the first process, then known to the pool when the second one gets it."""
        first, second = urls[0], urls[1 % len(urls)]
        samples: Samples = {MISS: [], ELSEWHERE: []}
        for number in range(self.sizes.rounds):
            samples[MISS].append(self._ttft(first, number, 0))
            time.sleep(SETTLE_S)
            samples[ELSEWHERE].append(self._ttft(second, number, 1))
            time.sleep(SETTLE_S)
        return samples

    def after_restart(self, urls: Sequence[str]) -> Samples:
        """The documents once more, to processes that have just started."""
        found = []
        for number in range(self.sizes.rounds):
            found.append(self._ttft(urls[number % len(urls)], number, 2))
            time.sleep(SETTLE_S)
        return {AFTER_RESTART: found}

    def _ttft(self, url: str, document: int, question: int) -> float:
        """Milliseconds."""
        text = self._source.tokens(self.sizes.document_tokens, DOCUMENT, document)
        prompt = text + self._source.tokens(QUESTION_TOKENS, QUESTION, document, question)
        return 1000 * ask(url, prompt, 2).ttft_s

    def sessions(self, urls: Sequence[str]) -> Samples:
        """Turn t of session s goes to process s + t: the processes take turns, as behind a balancer that does not know
        their caches."""
        begun = time.perf_counter()
        answers = asyncio.run(self._sessions(urls))
        seconds = time.perf_counter() - begun
        ttft = 1000 * sum(answer.ttft_s for answer in answers) / len(answers)
        return {TURNS_PER_S: [len(answers) / seconds], TURN_TTFT: [ttft]}

    async def _sessions(self, urls: Sequence[str]) -> list[Answer]:
        sizes = self.sizes
        async with open_session() as http:

            async def one(session: int) -> list[Answer]:
                context: list[int] = []
                answers = []
                for turn in range(sizes.turns):
                    length = sizes.turn_tokens if turn else sizes.first_tokens
                    context += self._source.tokens(length, TURN, session, turn)
                    url = urls[(session + turn) % len(urls)]
                    answers.append(await complete(http, url, context, sizes.answer_tokens))
                    context += answers[-1].tokens
                return answers

            found = await asyncio.gather(*(one(session) for session in range(sizes.sessions)))
        return [answer for answers in found for answer in answers]
