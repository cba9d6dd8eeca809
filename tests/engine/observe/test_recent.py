"""Figures of the last requests: sources add up to the prompt, percentiles are values that occurred."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.observe.recent import MAX_RECENT_REQUESTS, Recent, percentiles, tokens_from
from engine.observe.timeline import Timeline

counts = st.integers(0, 20)


def ended(prompt: int, cached: int = 0, **tiers: int) -> Timeline:
    timeline = Timeline("r", prompt)
    timeline.cached_tokens, timeline.output_tokens = cached, 3
    timeline.add(1.0, "a", "accepted")
    if tiers:
        timeline.add(1.1, "p", "prefix_fetched", tiers=tiers, seconds=0.05, transports={})
    timeline.add(1.25, "a", "first_token")
    timeline.add(1.75, "a", "answered")
    return timeline


@given(own=counts, arena=counts, dram=counts, ssd=counts, computed=st.integers(1, 100))
def test_the_sources_of_a_prompt_add_up_to_it(own, arena, dram, ssd, computed):
    found = 16 * (own + arena + dram + ssd)
    sources = tokens_from(ended(found + computed, found, arena=arena, dram=dram, ssd=ssd), 16)
    fetched = {"arena": 16 * arena, "dram": 16 * dram, "ssd": 16 * ssd}
    assert sources == {"hbm": 16 * own, **fetched, "computed": computed}


@given(st.lists(st.floats(0, 1e6) | st.none()))
def test_percentiles_are_values_that_occurred_in_order(values):
    found = percentiles(values)
    known = [value for value in values if value is not None]
    assert (found is None) == (not known)
    if found is not None:
        assert set(found.values()) <= set(known)
        assert found["p50"] <= found["p90"] <= found["p99"] <= max(known)


def test_newest_first_and_bounded():
    recent = Recent(16)
    assert recent.as_dict(0.0)["ttft_ms"] is None
    for index in range(MAX_RECENT_REQUESTS + 5):
        recent.add(ended(32, 16, dram=1), "standard", "stop", float(index))
    told = recent.as_dict(0.0)
    assert [row["ended"] for row in told["requests"]][:2] == [MAX_RECENT_REQUESTS + 4, MAX_RECENT_REQUESTS + 3]
    assert len(told["requests"]) == MAX_RECENT_REQUESTS
    assert told["ttft_ms"] == {"p50": 250.0, "p90": 250.0, "p99": 250.0}
    assert told["requests"][0]["tpot_ms"] == 250.0  # two gaps in 0.5 s
    assert told["tokens_from"] == {
        "hbm": 0,
        "arena": 0,
        "dram": 16 * MAX_RECENT_REQUESTS,
        "ssd": 0,
        "computed": 16 * MAX_RECENT_REQUESTS,
    }


def test_a_client_that_left_has_an_end_too():
    recent = Recent(16)
    timeline = ended(10)
    timeline.events.pop()
    recent.add(timeline, "batch", None, 2.0)
    (row,) = recent.as_dict(0.0)["requests"]
    assert (row["reason"], row["tpot_ms"], row["class"]) == ("abort", None, "batch")


def test_the_newest_refusal_is_kept_beside_the_figures():
    recent = Recent(16)
    assert recent.as_dict(0.0)["refused"] is None
    recent.add(ended(32), "standard", "stop", 1.0)
    for at in (2.0, 3.0):
        recent.refuse(f"r-{at:g}", at)
    told = recent.as_dict(0.0)
    assert told["refused"] == {"id": "r-3", "ended": 3.0} and len(told["requests"]) == 1
