"""The connector's counters: their names, what they mean, and how they are added and shown. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

MEANINGS = {
    "lookups": "Lookups of prompts in the pool",
    "lookups_late": "Lookups that were not answered in time, so the prompt was computed",
    "lookups_failed": "Lookups that failed",
    "hit_tokens": "Tokens whose KV was to be loaded from the pool",
    "loads": "Loads of requests",
    "load_blocks": "Blocks loaded from the pool",
    "load_bytes": "Bytes loaded from the pool",
    "load_us": "Microseconds from the begin of each load to its end",
    "layer_wait_us": "Microseconds that layers of the model waited for their KV from the pool",
    "loads_failed": "Loads that did not bring all blocks",
    "load_blocks_failed": "Blocks that were not loaded and are computed again",
    "loads_by_layer": "Loads during the step, layer by layer",
    "save_blocks": "Blocks to be saved",
    "saved_blocks": "Blocks that the pool did not have and has now",
    "saved_bytes": "Bytes of these blocks",
    "save_blocks_dropped": "Blocks not saved because the staging memory was full",
    "save_blocks_discarded": "Blocks not saved because a load failed in the step or shortly before",
    "saves_failed": "Saves that failed",
    "save_wait_us": "Microseconds that steps waited for the copies of their blocks",
    "waits": "Requests that waited for the blocks of their producer",
    "waits_in_vain": "Such requests whose blocks had not come in time",
    "wait_us": "Microseconds that requests waited for their producer",
}


def added(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """Sums by name."""
    return dict(Counter(one) + Counter(other))


def shown(counts: Mapping[str, int]) -> dict[str, int | float]:
    """For one line of a log: times in milliseconds, counters that are zero left out."""
    rows: dict[str, int | float] = {}
    for name, count in counts.items():
        if count and name.endswith("_us"):
            rows[name.removesuffix("_us") + "_ms"] = round(count / 1000, 1)
        elif count:
            rows[name] = count
    return rows
