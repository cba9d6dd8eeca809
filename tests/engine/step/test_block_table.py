"""The array of a list that grows or is replaced, against the list."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.step.block_table import BlockTable

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=80)


@given(st.lists(st.tuples(st.sampled_from(["grow", "replace", "cut", "look"]), IDS), max_size=20))
def test_it_equals_its_list_after_every_change(changes):
    table, ids = BlockTable(), []
    for kind, more in changes:
        if kind == "grow":
            ids += more
        elif kind == "replace":
            ids = [*more]
        elif kind == "cut":
            del ids[len(ids) // 2 :]
        found = table.of(ids)
        assert found.dtype == np.int32
        assert found.tolist() == ids


def test_a_list_that_was_cut_and_refilled_is_read_again():
    table, ids = BlockTable(), [1, 2, 3, 4]
    table.of(ids)
    del ids[2:]
    ids += [7, 8, 9]
    assert table.of(ids).tolist() == [1, 2, 7, 8, 9]
