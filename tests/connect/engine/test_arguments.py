"""Arguments of transfer calls: integers of any kind, and what is possible at all."""

import numpy as np
import pytest

from connect.engine.arguments import END, host_and_port, moves_of, one_move, possible_moves


def test_integers_of_any_kind_become_moves():
    assert moves_of(np.array([5, 6]), (7, 8), [np.int64(1), 2]) == [(5, 7, 1), (6, 8, 2)]
    assert all(type(number) is int for move in moves_of(np.array([5]), [7], [1]) for number in move)
    assert one_move(np.uint64(END - 1), 3, 4) == ((END - 1, 3, 4),)
    assert moves_of([1], [2, 3], [4]) is None and moves_of([], [], []) == []
    for wrong in ("5", 5.0, None):
        with pytest.raises(TypeError):
            one_move(wrong, 1, 1)
        with pytest.raises(TypeError):
            moves_of([wrong], [1], [1])


def test_moves_that_cannot_be_and_empty_ones():
    good = [(1, 2, 3), (END - 3, END - 3, 3)]
    assert possible_moves(good) is good
    assert possible_moves([(1, 2, 3), (-1, 2, 0)]) == [(1, 2, 3)]
    for bad in ((-1, 2, 3), (1, -2, 3), (1, 2, -3), (END - 2, 2, 3), (1, END - 2, 3)):
        assert possible_moves([(1, 2, 0), bad]) is None
        assert possible_moves([bad]) is None


def test_hosts_and_ports():
    assert host_and_port("10.0.0.1") == ("10.0.0.1", 0) and host_and_port("a:5") == ("a", 5)
    assert host_and_port("[::1]:5") == ("::1", 5) and host_and_port("::1") == ("::1", 0)
