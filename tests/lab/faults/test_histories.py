"""The checker of histories, against every order tried one by one, and against histories of a register that is one."""

from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from lab.faults.histories import Operation, apply, linearizable

VALUES = st.sampled_from([b"v", b"w"])


def put(called, returned, value, answer=True, failed=False):
    return Operation("put", called, returned, value, answer, failed)


def get(called, returned, answer, failed=False):
    return Operation("get", called, returned, None, answer, failed)


def by_hand(history):
    """All orders, of all choices of what failed operations took effect."""
    sure = [one for one in history if not one.failed]
    unsure = [one for one in history if one.failed]
    for chosen in range(1 << len(unsure)):
        some = sure + [one for i, one in enumerate(unsure) if chosen >> i & 1]
        for order in permutations(some):
            late = any(
                not before.failed and before.returned < after.called
                for at, after in enumerate(order)
                for before in order[at + 1 :]
            )
            state, good = None, not late
            for one in order:
                fits, state = apply(state, one)
                good = good and fits
            if good:
                return True
    return False


@st.composite
def operations(draw):
    called = draw(st.integers(0, 12))
    returned = called + draw(st.integers(1, 6))
    failed = draw(st.booleans()) and draw(st.booleans())
    if draw(st.booleans()):
        return put(called, returned, draw(VALUES), draw(st.booleans()), failed)
    return get(called, returned, draw(st.none() | VALUES), failed)


@given(st.lists(operations(), max_size=5))
@settings(max_examples=400, deadline=None)
def test_it_says_what_trying_every_order_says(history):
    assert linearizable(history) == by_hand(history)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_what_one_copy_answered_is_linearizable_and_a_changed_answer_of_a_lone_get_is_not(data):
    """Each operation takes effect at a moment of its own, which is inside of its interval."""
    kinds = data.draw(st.lists(st.sampled_from([b"v", b"w", None]), min_size=1, max_size=30))
    state, history = None, []
    for moment, value in enumerate(kinds):
        before, after = data.draw(st.floats(0.1, 5)), data.draw(st.floats(0.1, 5))
        if value is None:
            history.append(get(moment - before, moment + after, state))
        else:
            history.append(put(moment - before, moment + after, value, state is None))
            state = state or value
    assert linearizable(data.draw(st.permutations(history)))
    end = len(kinds) + 10.0
    assert not linearizable([*history, get(end, end + 1, b"never put")])
    if state is not None:
        assert not linearizable([*history, get(end, end + 1, None)])


def test_a_value_that_changes_and_two_first_puts_are_found():
    assert not linearizable([put(0, 1, b"v"), put(0, 1, b"w")])
    assert not linearizable([put(0, 1, b"v"), put(0, 1, b"w", False), get(2, 3, b"v"), get(4, 5, b"w")])
    assert linearizable([put(0, 1, b"v", failed=True), get(2, 3, None), get(4, 5, b"v")]), "it took effect late"
    assert not linearizable([put(0, 1, b"v", failed=True), get(2, 3, b"v"), get(4, 5, None)])
