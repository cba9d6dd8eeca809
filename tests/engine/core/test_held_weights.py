"""Which weights a request may use: one and the same from its first token to its last."""

import pytest

from engine.core.held_weights import HeldWeights

A, B, C = b"", b"b" * 16, b"c" * 16


def test_new_requests_begin_with_the_current_weights_and_others_end_with_theirs():
    held = HeldWeights("a")
    assert held.serves(A, begun=False) and not held.serves(B, begun=False)
    held.add(B, "b")
    assert held.current == A and held.serves(A, begun=False)
    assert held.serves(B, begun=False), "an acceptor that switched first may use them"
    held.switch(5.0, B)
    assert (held.current, held.retired(), held.runner(B)) == (B, [(A, 5.0)], "b")
    assert held.serves(A, begun=True) and not held.serves(A, begun=False), "replaced weights begin nothing"
    assert held.drop(A) == "a" and not held.serves(A, begun=True) and held.retired() == []


def test_the_current_weights_are_never_dropped_and_may_come_back():
    held = HeldWeights("a")
    held.add(B, "b")
    held.switch(1.0, B)
    held.add(A, "another a")
    held.switch(2.0, A)
    assert held.runner(A) == "a" and held.retired() == [(B, 2.0)] and held.serves(A, begun=False)
    assert held.drop(A) is None and held.drop(C) is None and A in held and len(held) == 2
    with pytest.raises(KeyError):
        held.switch(3.0, C)
    assert held.current == A
