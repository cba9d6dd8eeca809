"""Block hit rates of the released traces, computed by another program (shared/traces/README.md). They are for one
global cache, a cold start, and hits of prefixes only. Tie rules change LFU by up to .003 and FIFO by up to .005."""

TOLERANCE = 0.005

CAPACITIES = (100_000, 50_000, 30_000, 10_000, 1_000)

TARGETS: dict[str, dict[str, tuple[float, ...]]] = {
    "conversation": {
        "lru": (0.364, 0.355, 0.326, 0.212, 0.045),
        "lfu": (0.363, 0.344, 0.276, 0.132, 0.048),
        "fifo": (0.356, 0.334, 0.294, 0.181, 0.044),
    },
    "synthetic": {
        "lru": (0.640, 0.640, 0.624, 0.424, 0.084),
        "lfu": (0.640, 0.640, 0.626, 0.359, 0.042),
        "fifo": (0.640, 0.640, 0.594, 0.399, 0.084),
    },
}
"""Rates by trace and policy, in the order of CAPACITIES."""

CEILINGS = {"conversation": 0.366, "synthetic": 0.640}
"""Rates with unlimited capacity."""
