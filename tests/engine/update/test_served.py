"""Which of two statements about a cluster's weights is newer, and the byte that tells them apart."""

import itertools
from dataclasses import asdict

import pytest

from engine.update.served import ServedWeights, served_of

START = ServedWeights()


def served(generation: int, digit: str = "a") -> ServedWeights:
    return ServedWeights(generation, digit * 32, "p/", "default", "v")


def test_the_newest_statement_wins_on_every_node():
    some = [START, served(1), served(1, "b"), served(2), served(17, "c")]
    for one, other in itertools.product(some, some):
        assert one.newer(other) == (some.index(one) > some.index(other))


def test_the_tag_differs_for_all_that_a_node_can_have_missed():
    assert START.tag == 0
    tags = [served(generation, digit).tag for generation in range(1, 17) for digit in "0123456789abcdef"]
    assert all(0 <= tag < 256 for tag in tags) and len(set(tags)) == 256
    assert (START.content, served(1).content) == (b"", bytes.fromhex("aa" * 16))


@pytest.mark.parametrize("wrong", [(-1, ""), (0, "a" * 32), (1, ""), (1, "a" * 31), (1, "g" * 32)])
def test_what_no_node_says_is_refused(wrong):
    with pytest.raises(ValueError):
        ServedWeights(*wrong)


def test_a_joining_node_reads_the_answer_of_the_cluster():
    assert served_of(None) == served_of({"model": "m"}) == START
    assert served_of({"weights": asdict(START) | {"root": "ab"}}) == START
    assert served_of({"weights": asdict(served(3)) | {"root": "ab"}}) == served(3)
    with pytest.raises(ValueError, match="expected form"):
        served_of({"weights": {"generation": 1}})
