"""Questions about documents, and whether their greedy answers equal those of one vLLM alone."""

from __future__ import annotations

from dataclasses import dataclass

from lab.bench.common.workload import TokenSource
from lab.foreign.common.completions import Answer

BLOCK_TOKENS = 128  # vLLM's block on CPU cores, and one value of the pool
VOCABULARY = 49_152
QUESTION_TOKENS, ANSWER_TOKENS = 40, 24


@dataclass(frozen=True, slots=True)
class Check:
    """One check. The first fields are those of every result file (lab/bench/common/results.py)."""

    case: str
    metric: str
    unit: str
    ours: bool  # passed
    note: str


class Questions:
    """Documents with several questions each: prompts that begin with the same tokens."""

    def __init__(self, document_tokens: int) -> None:
        self._source, self._length = TokenSource(0, VOCABULARY), document_tokens

    def __call__(self, document: int, question: int) -> list[int]:
        text = self._source.tokens(self._length, 1, document)
        return text + self._source.tokens(QUESTION_TOKENS, 2, document, question)

    @property
    def shared_tokens(self) -> int:
        """Of a document, in whole blocks."""
        return self._length // BLOCK_TOKENS * BLOCK_TOKENS


class Checks:
    """What was asked and answered, compared with the answers of one vLLM alone."""

    def __init__(self, questions: Questions, alone: dict[tuple[int, int], list[int]]) -> None:
        self.questions, self._alone = questions, alone
        self.found: list[Check] = []

    def compare(self, case: str, answers: dict[tuple[int, int], Answer], cached: bool | None = None) -> None:
        """`cached`: whether each prompt's document must have come from a cache, None = either way."""
        wrong = [key for key, answer in answers.items() if answer.tokens != self._alone[key]]
        shared = self.questions.shared_tokens
        other = [key for key, a in answers.items() if cached is not None and (a.cached_tokens >= shared) != cached]
        times = ", ".join(f"{answer.ttft_s:.2f} s ({answer.cached_tokens} cached)" for answer in answers.values())
        note = f"time to first token: {times}"
        note += f"; other tokens for {wrong}" if wrong else ""
        note += f"; {'not ' if cached else ''}cached: {other}" if other else ""
        self.say(case, not wrong and not other, note)

    def say(self, case: str, passed: bool, note: str) -> None:
        self.found.append(Check(case, "passed", "bool", passed, note))
