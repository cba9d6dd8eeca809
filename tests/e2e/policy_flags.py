"""Which node of test_policy_flags.py runs with which value of which policy flag, and what shows that it has an effect.

Pure. `test_every_value_has_a_row` fails for a flag or a value that is in the code and not here.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields

from engine.config.config import Config

Flags = dict[str, str]

BLOCK, ARENA_BLOCKS, BLOCK_BYTES = 64, 64, 4 * 12288
"""Of the nodes that are alone: tokens of a block, blocks of the KV arena, bytes of a block of the tiny model."""

SLOW_RAIL = 10_000_000
"""Bytes per second: one block of the tiny model takes longer than 1 ms."""

GROUPED = 1200
"""Tokens of a prompt that several nodes compute if the node that accepts it says so."""

LEAST_PROMPT_ROW = 32
"""A row of a step with fewer tokens is a decode, with or without drafts."""

EVERY_ALONE: Flags = {
    "block_size": str(BLOCK),
    "kv_cache_bytes": str(ARENA_BLOCKS * BLOCK_BYTES),
    "dram_bytes": "16M",
    "max_num_seqs": "2",
    "max_num_batched_tokens": "2400",
    "prefill_chunk_tokens": "1024",
    "tbt_budget_ms": "1",
    "max_step_ms": "60000",
    "slo": "interactive:ttft=1,tbt=900000;standard:ttft=50000,tbt=900000;batch:ttft=200000,tbt=900000",
    "slo_scale": "0.001",
    "prefix_fetch": "never",
    "calibration_ms": "0",
    "num_threads": "1",
}
ALONE: dict[str, Flags] = {
    "one": {"eviction": "lru", "queue_order": "fcfs", "batching_policy": "prefill-first", "rejection": "none"}
    | {"migration": "none", "placement": "windserve"},
    "two": {"eviction": "lfu", "queue_order": "edf", "batching_policy": "decode-first", "rejection": "stage-load"}
    | {"ssd_backend": "file", "migration": "balance", "placement": "gorgo"},
    "three": {"eviction": "fifo", "queue_order": "srpt", "batching_policy": "mixed", "rejection": "early"}
    | {"speculative_method": "suffix", "speculative_length": "fixed", "placement": "banaserve"},
    "four": {"eviction": "length-aware", "queue_order": "weighted-fair", "rejection": "predicted"}
    | {"batching_policy": "decode-first", "speculative_method": "draft", "speculative_length": "fixed"}
    | {"speculative_acceptance": "rejection", "placement": "netkv"},
    "five": {"eviction": "s3-fifo", "batching_policy": "dynamic", "cache_shares": "standard=0.4"}
    | {"speculative_method": "ngram", "speculative_length": "fixed", "placement": "ecoserve"},
    "six": {"eviction": "cost-aware", "speculative_method": "ngram", "prefix_fetch": "auto", "placement": "taichi"},
}
"""Each is a cluster by itself, so that nobody else sends it requests."""

EVERY_TOGETHER: Flags = {
    "kv_cache_bytes": "16M",
    "calibration_ms": "0",
    "num_threads": "1",
    "role_change_hold_ms": "600000",
    "prefetch_timeout_ms": "60000",
    "prefix_fetch": "always",
}
TOGETHER: dict[str, Flags] = {
    "prefill-0": {"placement": "mooncake", "kv_transfer": "push", "kv_overlap": "layer", "prefetch": "wait"},
    "prefill-1": {"placement": "mooncake-central-greedy", "kv_transfer": "pull", "kv_overlap": "chunk"}
    | {"prefetch": "best-effort"},
    "prefill+decode-0": {"placement": "mooncake-learned", "first_role": "prefill", "kv_overlap": "none"}
    | {"prefetch": "timeout", "prefetch_timeout_ms": "1", "rail_limit": str(SLOW_RAIL)},
    "prefill+decode-1": {"placement": "dynamo-cost", "first_role": "decode", "speculative_method": "draft"}
    | {"role_policy": "dopd"}
    | {"speculative_length": "fixed", "speculative_acceptance": "same-draw"},
    "store-0": {"placement": "power-of-two", "cache_admission": "always"},
    "store-1": {"placement": "local-cache", "cache_admission": "second-hit"},
    "store-2": {"placement": "least-load", "cache_admission": "tinylfu"},
    "store-3": {"placement": "round-robin", "cache_admission": "class-aware"},
    "store-4": {"placement": "random", "cache_admission": "always", "prefill_parallel": "cpp"}
    | {"cpp_min_tokens": str(GROUPED), "cpp_min_gain": "-100"},
    "store-5": {"placement": "llm-d", "cache_admission": "always", "prefill_parallel": "cp"}
    | {"cpp_min_tokens": str(GROUPED), "cpp_min_gain": "-100"},
    "store-6": {"placement": "preble", "cache_admission": "always"},
    "store-7": {"placement": "mooncake-cost", "cache_admission": "always"},
}
"""One cluster. Requests are placed by the node that accepts them; store nodes load no weights and start fast."""

NODES = "prefill=2,prefill+decode=2,store=8"
PREFILLS = {"prefill-0", "prefill-1", "prefill+decode-0"}
DECODE = "prefill+decode-1"


@dataclass(frozen=True, slots=True)
class Row:
    """`node` runs with the value; `test` asserts its effect; `not_asserted` says what of it is not, and why. Or no node
    of this file can run with it, because it needs another model: then `elsewhere` asserts its effect."""

    node: str = ""
    test: str = ""
    not_asserted: str = ""
    elsewhere: str = ""  # file::test


_EVICTION, _ORDER, _CHUNKS = "test_eviction", "test_queue_order_and_rejection", "test_chunks_of_a_prompt"
_PLACEMENT, _ADMISSION, _MOVED = "test_placement", "test_admission_to_a_full_share", "test_how_kv_moved"
_BY_TIME_PER_TOKEN = "how the three differ, by the time per token, depends on measured times: tests/sched"
_FETCH, _GUESSES = "test_prefixes_from_the_pool", "test_speculation_gives_the_same_tokens"

ROWS: dict[str, dict[str, Row]] = {
    "eviction": {flags["eviction"]: Row(node, _EVICTION) for node, flags in ALONE.items()},
    "cache_shares": {"none": Row("one", "test_shares"), "standard=0.4": Row("five", "test_shares")},
    "queue_order": {ALONE[node]["queue_order"]: Row(node, _ORDER) for node in ("one", "two", "three", "four")},
    "rejection": {
        "none": Row("one", _ORDER),
        "stage-load": Row("two", _ORDER, _BY_TIME_PER_TOKEN),
        "early": Row("three", _ORDER, _BY_TIME_PER_TOKEN),
        "predicted": Row("four", _ORDER, _BY_TIME_PER_TOKEN),
    },
    "batching_policy": {ALONE[node]["batching_policy"]: Row(node, _CHUNKS) for node in ("one", "two", "three", "five")},
    "placement": {flags["placement"]: Row(node, _PLACEMENT) for node, flags in TOGETHER.items()}
    | {
        flags["placement"]: Row(node, not_asserted="the choice among several nodes: tests/sched/placement")
        for node, flags in ALONE.items()
        if "placement" in flags
    }
    | {
        "mooncake-learned": Row(
            "prefill+decode-0", _PLACEMENT, "how it differs from mooncake depends on measured times: tests/sched"
        ),
        "mooncake-cost": Row("store-7", _PLACEMENT, "which node is cheap depends on measured times: tests/sched"),
    },
    "cache_admission": {TOGETHER[f"store-{n}"]["cache_admission"]: Row(f"store-{n}", _ADMISSION) for n in (0, 1, 2, 3)},
    "kv_transfer": {"push": Row("prefill-0", _MOVED), "pull": Row("prefill-1", _MOVED)},
    "kv_overlap": {
        "layer": Row("prefill-0", _MOVED),
        "chunk": Row("prefill-1", _MOVED),
        "none": Row("prefill+decode-0", _MOVED),
    },
    "prefill_parallel": {
        "none": Row("store-3", "test_groups_of_prefill_nodes"),
        "cpp": Row("store-4", "test_groups_of_prefill_nodes"),
        "cp": Row("store-5", "test_groups_of_prefill_nodes"),
    },
    "first_role": {
        "both": Row("one", "test_roles_at_the_start"),
        "prefill": Row("prefill+decode-0", "test_roles_at_the_start"),
        "decode": Row(DECODE, "test_roles_at_the_start"),
    },
    "role_policy": {
        "threshold": Row(elsewhere="test_role_changes.py::test_a_node_changes_its_role_when_the_load_shifts"),
        "dopd": Row(
            DECODE, not_asserted="whether it changes depends on measured times: tests/sched/test_role_ratio.py"
        ),
    },
    "prefix_fetch": {
        "always": Row("prefill-0", _FETCH),
        "never": Row("one", _EVICTION),
        "auto": Row("six", not_asserted="depends on measured times: test_next_turn.py has one that pays"),
    },
    "migration": {
        "none": Row("one", not_asserted="nothing happens: the default and balance are the ones with an effect"),
        "drain": Row("prefill-0", not_asserted="needs a node that leaves: test_migration.py"),
        "balance": Row("two", not_asserted="needs two decode nodes with unequal loads: test_migration.py"),
    },
    "prefetch": {
        "wait": Row("prefill-0", _FETCH),
        "best-effort": Row("prefill-1", _FETCH),
        "timeout": Row("prefill+decode-0", _FETCH),
    },
    "ssd_backend": {"lmdb": Row("one", "test_ssd_backends"), "file": Row("two", "test_ssd_backends")},
    "speculative_method": {
        "none": Row("one", _GUESSES),
        "ngram": Row("five", _GUESSES),
        "suffix": Row("three", _GUESSES),
        "draft": Row(DECODE, _GUESSES),
        "mtp": Row(elsewhere="test_layer_drafts.py::test_prefill_decode_and_store_nodes"),
        "eagle": Row(elsewhere="test_layer_drafts.py::test_prefill_decode_and_store_nodes"),
    },
    "speculative_length": {
        "fixed": Row("five", _GUESSES),
        "auto": Row("six", not_asserted="whether a guess pays depends on measured times; its tokens are compared"),
    },
    "speculative_acceptance": {
        "same-draw": Row(DECODE, _GUESSES),
        "rejection": Row("four", _GUESSES, "that other drafts give the same distribution: tests/engine"),
    },
}

OTHERS = {
    "net": "constants of gossip: tests/sched",
    "log_level": "no policy",
    "log_format": "no policy",
    "load_format": "how weights are read: tests/engine/checkpoint",
    "dtype": "a number format",
    "weight_dtype": "a number format: test_weight_dtype.py",
    "kv_groups": "which bytes move and stay: test_windows.py",
    "pool_windows": "which bytes the pool keeps: test_windows.py",
    "kv_cache_dtype": "a number format: test_quantized_arena.py, test_speculation.py",
    "cluster_kv_dtype": "a number format: test_unlike_nodes.py",
    "pool_dtype": "a number format: test_pool_contents.py",
    "wire_dtype": "a number format: test_wire_dtype.py",
    "wire_codec": "how bytes travel: test_wire_codec.py",
    "device": "a machine",
    "collectives": "an implementation: tests/e2e/test_tensor_parallel.py, tests/net/collectives",
    "beyond_memory": "where KV of one long request lies: test_beyond.py",
    "attention_elsewhere": "where KV of one long request lies: test_elsewhere.py",
    "offload": "where weights lie: test_offload.py",
    "expert_loss": "what a lost rank means: tests/engine/experts, test_experts.py",
    "expert_dispatch_dtype": "a number format: tests/engine/experts",
    "attention_backend": "an implementation: tests/attention",
    "latent_prompts": "an implementation: tests/engine/model/test_latent_prompts.py, test_latent.py",
    "cpu_level": "an implementation: tests/attention",
    "unknown_fields": "what the API refuses: tests/net/http",
    "transport": "an implementation: test_transports.py, rdma in tests/rdma",
}
"""Fields with choices that name no policy, and where they are tested."""


SWITCHES = {
    "enable_prefix_caching": "test_switches.py::test_prefix_caching",
    "block_checksums": "test_switches.py::test_block_checksums",
    "placement_tolls": "test_switches.py::test_placement_tolls",
    "prefix_intents": "test_switches.py::test_prefix_intents",
    "weights_from_store": "test_pool_contents.py::test_encoded_prefixes_and_weights",
    "enforce_eager": "../engine/model/test_graphs.py::test_a_runner_replays_small_steps_and_computes_the_others",
    "session_parking": "test_sessions.py::test_kv_of_a_session_is_parked_between_its_turns",
    "prefault": "test_switches.py::test_prefault",
    "trust_request_chat_template": "test_switches.py::test_templates_of_clients",
    "rdma_plaintext": "../net/transfer/rdma/test_rdma_absent.py::test_what_must_be_sealed_does_not_go_by_rdma",
}
"""Flags that are on or off, and the test that asserts the difference."""


def switches() -> set[str]:
    return {one.name for one in fields(Config) if isinstance(one.default, bool)}


def choices() -> dict[str, set[str]]:
    """Of every field of Config that has some; and --cache-shares, which is a policy too: none, or shares."""
    found = {one.name: set(one.metadata["choices"]) for one in fields(Config) if one.metadata["choices"]}
    return found | {"cache_shares": {"none", "standard=0.4"}}


def value(node: str, field: str) -> str:
    """With which `node` runs, by the tables above."""
    flags = EVERY_ALONE | ALONE[node] if node in ALONE else EVERY_TOGETHER | TOGETHER[node]
    (default,) = (one.default for one in fields(Config) if one.name == field)
    assert default is not MISSING
    return flags.get(field, str(default))


def argv(flags: Flags) -> list[str]:
    return [word for name, text in flags.items() for word in (f"--{name.replace('_', '-')}", text)]
