"""When a thread looks for bytes before it sleeps."""

from net.loop.spinning import SKIP_MAX, Spinning


def waits(spinning, ends):
    """Whether each wait looked; `ends`: whether it would find bytes in time."""
    looked = []
    for in_time in ends:
        looked.append(spinning.begin())
        if looked[-1]:
            spinning.ended(in_time)
    return looked


def test_a_thread_that_finds_nothing_looks_ever_less_often():
    spinning = Spinning()
    assert waits(spinning, [False] * 9) == [True, False, False, True, *[False] * 4, True]
    looked = [at for at, it_did in enumerate(waits(spinning, [False] * 1000)) if it_did]
    assert {b - a for a, b in zip(looked[-5:], looked[-4:], strict=False)} == {SKIP_MAX + 1}


def test_a_find_in_time_starts_it_anew():
    spinning = Spinning()
    waits(spinning, [False] * 8)  # two failures
    assert waits(spinning, [True] * 3) == [True] * 3
    assert waits(spinning, [False] * 4) == [True, False, False, True]
