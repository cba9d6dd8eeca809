"""Messages and receives in any order, against a plain model."""

from hypothesis import given
from hypothesis import strategies as st

from net.collectives.matching import Matching, Message, Receive

steps = st.lists(
    st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 1), st.booleans()), max_size=40
)  # (arrives, source, tag, from any source)


@given(steps)
def test_each_receive_gets_the_first_message_that_fits(script):
    matching = Matching()
    early: list[tuple[int, int, int]] = []  # source, tag, number
    waiting: list[tuple[int | None, int, int]] = []
    for number, (arrives, source, tag, any_source) in enumerate(script):
        if arrives:
            fits = next((one for one in waiting if one[1] == tag and one[0] in (None, source)), None)
            found = matching.arrived(source, (1, tag))
            assert (found.into if found else None) == (fits[2] if fits else None)
            if fits:
                waiting.remove(fits)
            else:
                early.append((source, tag, number))
                matching.keep(Message(source, (1, tag), 10, data=number))
        else:
            wanted = None if any_source else source
            fits = next((one for one in early if one[1] == tag and wanted in (None, one[0])), None)
            found = matching.post(Receive(wanted, (1, tag), number))
            assert (found.data if found else None) == (fits[2] if fits else None)
            if fits:
                early.remove(fits)
            else:
                waiting.append((wanted, tag, number))
        assert matching.early_bytes == 10 * len(early)
    gone = matching.lost(0, {0, 1})
    assert [one.into for one in gone] == [number for source, _, number in waiting if source == 0]
    last = matching.lost(1, {1})
    assert [one.into for one in last] == [number for source, _, number in waiting if source in (1, None)]
