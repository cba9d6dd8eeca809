"""What counts as passed when vLLM processes are compared with one vLLM alone."""

from __future__ import annotations

import pytest

from lab.foreign.common.checks import QUESTION_TOKENS, Checks, Questions
from lab.foreign.common.completions import Answer
from lab.foreign.vllm.engines import cores_of

ALONE = {(0, 0): [1, 2], (0, 1): [3, 4]}


@pytest.mark.parametrize(
    ("tokens", "cached_tokens", "must", "passed"),
    [
        ([3, 4], 256, True, True),
        ([3, 4], 300, None, True),
        ([3, 4], 0, None, True),
        ([3, 4], 0, False, True),
        ([3, 5], 256, True, False),  # another token
        ([3], 256, True, False),
        ([3, 4], 128, True, False),  # a block of the document was computed
        ([3, 4], 256, False, False),
    ],
)
def test_one_wrong_answer_fails_a_check(tokens, cached_tokens, must, passed):
    checks = Checks(Questions(300), ALONE)
    right = Answer([1, 2], 0.5, 1.0, 256 if must else 0)
    checks.compare("case", {(0, 0): right, (0, 1): Answer(tokens, 0.5, 1.0, cached_tokens)}, must)
    (found,) = checks.found
    assert found.ours is passed
    assert ("(0, 1)" in found.note) is not passed


def test_questions_share_their_document_only():
    questions = Questions(300)
    assert questions.shared_tokens == 256
    one, two, other = questions(0, 0), questions(0, 1), questions(1, 0)
    assert one[:300] == two[:300] != other[:300]
    assert one[300:] != two[300:] and len(one) == 300 + QUESTION_TOKENS


def test_processes_share_the_cores():
    assert cores_of([0, 1, 2, 3, 4], 2) == [[0, 1], [2, 3]]
    assert cores_of([6, 7], 2) == [[6], [7]]
    assert cores_of([0, 1], 3) == [[0], [1], [0]]
