"""Two sites that read the same documents: shares, prefixes and times of the requests."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from lab.loads.busy_site import BUSY, OTHER, QUESTION_TOKENS, BusySite

LOAD = BusySite(requests=2000, rate_s=4.0, busy_share=0.7, documents=10, document_tokens=300, answer_tokens=5)


def test_rows_are_seeded_sorted_and_at_the_rate():
    rows = LOAD.rows(3)
    assert rows == LOAD.rows(3) != LOAD.rows(4)
    assert rows[0].timestamp_ms == 0.0
    assert all(a.timestamp_ms <= b.timestamp_ms for a, b in pairwise(rows))
    assert rows[-1].timestamp_ms / 1000 == pytest.approx(2000 / 4.0, rel=0.1)
    assert Counter(row.site for row in rows)[BUSY] / 2000 == pytest.approx(0.7, abs=0.04)


def test_both_sites_read_the_same_documents_with_questions_of_their_own():
    rows, whole = LOAD.rows(1), LOAD.document_tokens // LOAD.block_tokens
    read = {place: {tuple(row.hash_ids[:whole]) for row in rows if row.site == place} for place in (OTHER, BUSY)}
    assert read[OTHER] == read[BUSY] and len(read[BUSY]) == LOAD.documents
    questions = [block for row in rows for block in row.hash_ids[whole:]]
    assert len(questions) == len(set(questions))
    for row in rows:
        asked = row.input_length - whole * LOAD.block_tokens
        assert QUESTION_TOKENS[0] <= asked <= QUESTION_TOKENS[1]
        assert len(row.hash_ids) == -(-row.input_length // LOAD.block_tokens)
        assert row.output_length == 5
