"""The table of a node's own metrics: kind, name, help, labels, buckets. Only metrics that net/metrics/events.py
fills."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

FIRST_TOKEN_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
NEXT_TOKEN_BUCKETS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
STALL_BUCKETS_S = (
    *(0.0002, 0.0005, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.007),
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
)
ERROR_BUCKETS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0)
REQUEST_BUCKETS_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)

ALIASES = {
    "vllm:gpu_cache_usage_perc": "vllm:kv_cache_usage_perc",
    "vllm:gpu_prefix_cache_queries": "vllm:prefix_cache_queries",
    "vllm:gpu_prefix_cache_hits": "vllm:prefix_cache_hits",
    "vllm:time_per_output_token_seconds": "vllm:inter_token_latency_seconds",
    "vllm:request_max_num_generation_tokens": "vllm:request_generation_tokens",
    "vllm:prompt_tokens_cached": "vllm:prefix_cache_hits",
}
"""Names that several versions of vLLM's dashboards and its production stack's router read -> our name."""


def size_buckets(largest: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `largest`."""
    steps = (digit * 10**power for power in range(len(str(largest))) for digit in (1, 2, 5))
    return tuple(step for step in steps if step <= largest) or (1,)


@dataclass(frozen=True, slots=True)
class Declared:
    """One metric. `labels`: in addition to the labels of every metric; buckets: of a Histogram."""

    kind: Any
    name: str
    text: str
    labels: tuple[str, ...] = ()
    buckets: Sequence[float] | None = None


ENGINE = (
    Declared(Gauge, "vllm:num_requests_running", "Requests in the running batch"),
    Declared(Gauge, "vllm:num_requests_waiting", "Requests waiting to be scheduled"),
    Declared(Gauge, "mooncake:requests_waiting", "Waiting requests, by service class", ("service_class",)),
    Declared(Gauge, "vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1"),
    Declared(
        Counter,
        "vllm:num_preemptions",
        "Requests sent back to the queue because blocks ran out or a higher class needed them",
    ),
    Declared(
        Counter,
        "mooncake:migrations",
        "Running requests that this node tried to move to another one, by reason (drain, balance, pressure) and "
        "result (moved, stayed, failed)",
        ("reason", "result"),
    ),
    Declared(Counter, "mooncake:migrated_bytes", "KV bytes copied by moves of running requests"),
    Declared(
        Histogram,
        "mooncake:migration_pause_seconds",
        "Pause of a moved request: from its last step here to its seat on the other node",
        buckets=STALL_BUCKETS_S,
    ),
    Declared(Counter, "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache"),
    Declared(Counter, "vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache, in any tier"),
    Declared(Counter, "vllm:spec_decode_num_drafts", "Verified drafts: one per request and step"),
    Declared(Counter, "vllm:spec_decode_num_draft_tokens", "Verified draft tokens"),
    Declared(Counter, "vllm:spec_decode_num_accepted_tokens", "Accepted draft tokens"),
    Declared(
        Counter,
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Accepted draft tokens, by position in the draft, counted from 0",
        ("position",),
    ),
    Declared(Histogram, "vllm:iteration_tokens_total", "Tokens per model step", buckets=size_buckets(20_000)),
)

TIMES = {
    "vllm:time_to_first_token_seconds": ("Time from arrival to first token", FIRST_TOKEN_BUCKETS_S),
    "vllm:inter_token_latency_seconds": ("Time between successive tokens", NEXT_TOKEN_BUCKETS_S),
    "vllm:request_time_per_output_token_seconds": (
        "Mean time per output token of a request, after the first token",
        NEXT_TOKEN_BUCKETS_S,
    ),
    "vllm:e2e_request_latency_seconds": ("Time from arrival to last token", REQUEST_BUCKETS_S),
    "vllm:request_queue_time_seconds": ("Time from arrival to the first step", REQUEST_BUCKETS_S),
    "vllm:request_prefill_time_seconds": ("Time from the first step to the first token", REQUEST_BUCKETS_S),
    "vllm:request_decode_time_seconds": ("Time from first to last token", REQUEST_BUCKETS_S),
    "vllm:request_inference_time_seconds": ("Time from the first step to the last token", REQUEST_BUCKETS_S),
}

REQUESTS = (
    Declared(Counter, "vllm:prompt_tokens", "Processed prompt tokens, including cached tokens"),
    Declared(Counter, "vllm:generation_tokens", "Generated tokens"),
    Declared(Counter, "vllm:request_success", "Finished requests, by reason", ("finished_reason",)),
    *(Declared(Histogram, name, text, buckets=buckets) for name, (text, buckets) in TIMES.items()),
    Declared(
        Histogram,
        "mooncake:time_to_first_token_seconds",
        "Time from arrival to first token, by service class",
        ("service_class",),
        FIRST_TOKEN_BUCKETS_S,
    ),
    Declared(
        Histogram,
        "mooncake:inter_token_latency_seconds",
        "Time between successive tokens, by service class",
        ("service_class",),
        NEXT_TOKEN_BUCKETS_S,
    ),
)

CLUSTER = (
    Declared(Gauge, "mooncake:cluster_members", "Members considered alive, by role", ("role",)),
    Declared(Gauge, "mooncake:node_cost", "Price of this node per hour (--node-cost)"),
    Declared(
        Gauge,
        "mooncake:scaling_nodes",
        "Nodes of the roles of --scale-nodes, and ranks with experts of this node (expert-rank), by state: needed for "
        "the load, ready, starting, draining",
        ("role", "state"),
    ),
    Declared(
        Counter,
        "mooncake:scaling_actions",
        "Nodes and ranks that this node started, asked to leave (drain) and stopped, by result (done, failed)",
        ("action", "result"),
    ),
    Declared(Gauge, "mooncake:weights_generation", "Replacements of the weights since the cluster began"),
    Declared(
        Gauge,
        "mooncake:weights_held",
        "Sets of weights in this node's memory: those it serves, prepared ones, and replaced ones that requests use",
    ),
    Declared(Counter, "mooncake:transfer_bytes", "KV bytes moved", ("direction", "transport")),
    Declared(Counter, "mooncake:transfer_seconds", "Time spent in transfers", ("direction", "transport")),
    Declared(Counter, "mooncake:transfer_failures", "Failed transfers", ("transport",)),
    Declared(Counter, "mooncake:wire_saved_bytes", "KV bytes that --wire-dtype saved in transfers to decode nodes"),
    Declared(
        Counter,
        "mooncake:store_hit_blocks",
        "Blocks of loaded prefixes, by tier: dram or ssd of the pool, or arena of another node",
        ("tier",),
    ),
    Declared(Counter, "mooncake:store_missed_blocks", "Blocks requested from the pool and not found"),
    Declared(Counter, "mooncake:store_put_blocks", "Blocks newly published to the pool"),
    Declared(
        Counter,
        "mooncake:session_turns",
        "Turns of sessions that ended here, by the way of their KV until the next one: stays, parked, away or over",
        ("way",),
    ),
    Declared(Counter, "mooncake:site_link_bytes", "Bytes of KV that this node has read from another site", ("site",)),
    Declared(
        Histogram,
        "mooncake:event_loop_stall_seconds",
        "Time for which a callback waits for the event loop, sampled 20 times per second",
        buckets=STALL_BUCKETS_S,
    ),
    Declared(
        Counter,
        "mooncake:event_loop_long_stall_seconds",
        "Total of the waits above 2 ms, by cause: a handler computed, no core was free, or another thread held the "
        "interpreter",
        ("cause",),
    ),
    Declared(
        Gauge,
        "mooncake:event_loop_longest_stall_seconds",
        "Longest wait of a callback for the event loop since the start",
    ),
    Declared(
        Histogram,
        "mooncake:placement_estimate_error",
        "|estimated - measured| / measured, of times above 1 ms; sum / count is the MAPE",
        ("estimate",),
        ERROR_BUCKETS,
    ),
    Declared(
        Counter,
        "mooncake:background_failures",
        "Background tasks, callbacks and threads that raised an exception, by name; each has an error line in the log",
        ("task",),
    ),
    Declared(Counter, "mooncake:grouped_prompts", "Prompts placed on several prefill nodes, counted on their acceptor"),
    Declared(Counter, "mooncake:stages", "Parts of long prompts that this node has computed in groups"),
    Declared(Counter, "mooncake:stage_bytes", "Bytes sent to other nodes of groups: hidden states or KV"),
    Declared(
        Counter,
        "mooncake:beyond_memory_requests",
        "Requests placed on a node whose arena does not hold their KV, counted on their acceptor",
    ),
    Declared(
        Counter,
        "mooncake:attention_asks",
        "Layers of requests beyond memory for which this node has asked another node to attend to blocks there",
    ),
    Declared(
        Counter,
        "mooncake:attention_asked_bytes",
        "Bytes of these asks: queries to other nodes, and parts of the output from them",
        ("direction",),
    ),
    Declared(
        Counter,
        "mooncake:attention_fallbacks",
        "Requests of this node whose blocks on another node were lost, and that began again",
    ),
    Declared(Counter, "mooncake:requests_resumed", "Requests placed again after a node was lost"),
    Declared(Counter, "mooncake:requests_rejected", "Requests refused before prefill", ("reason",)),
)


def declared(max_model_len: int) -> Iterator[Declared]:
    """All declared metrics. max_model_len: the upper end of the buckets of token counts."""
    sizes = size_buckets(max_model_len)
    yield from ENGINE
    yield from REQUESTS
    yield Declared(Histogram, "vllm:request_prompt_tokens", "Prompt tokens per request", buckets=sizes)
    yield Declared(Histogram, "vllm:request_generation_tokens", "Output tokens per request", buckets=sizes)
    yield from CLUSTER
