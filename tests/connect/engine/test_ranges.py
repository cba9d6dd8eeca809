"""Registered memory by address."""

import random

from connect.engine.ranges import Ranges


def test_find_and_overlaps_against_a_list():
    seed = 7
    print(f"seed {seed}")
    chance, ranges, known = random.Random(seed), Ranges(), {}
    for step in range(2000):
        start, nbytes = chance.randrange(1, 500), chance.randrange(1, 30)
        if chance.random() < 0.4:
            free = all(start + nbytes <= at or at + length <= start for at, (length, _) in known.items())
            assert ranges.add(start, nbytes, f"n{step}") == free
            if free:
                known[start] = nbytes, f"n{step}"
        elif chance.random() < 0.3:
            assert ranges.remove(start) == known.pop(start, (0, None))[1]
        else:
            inside = [
                (name, start - at)
                for at, (length, name) in known.items()
                if at <= start and start + nbytes <= at + length
            ]
            assert ranges.find(start, nbytes) == (inside[0] if inside else None)
    assert [row[0] for row in ranges.rows()] == sorted(known)
