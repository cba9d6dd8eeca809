"""All parameters of a run except its requests; written into every result."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class SimConfig:
    """Nodes are `prefill` + `decode`, or `mixed` ones; each has a cache of `cache_blocks` and a share of the pool of
    `pool_blocks`, with `ssd_blocks` behind it. Times in seconds."""

    # a preset of lab/simulator/models/step_models.py, or a file that scripts/tools.py validate wrote
    model: str = "llama3-70b-8xa800"
    prefill: int = 8  # nodes that compute prompts
    decode: int = 8  # nodes that decode
    mixed: int = 0  # nodes that do both
    placement: str = "mooncake"  # see sched/placement/table.py
    queue_order: str = "fcfs"  # or edf, srpt, weighted-fair (sched/queueing.py)
    eviction: str = "lru"  # see cache/pool/policies/
    cache_blocks: int = 6_000  # of a node, in its own memory
    pool_blocks: int = 0  # of a node's share of the pool
    ssd_blocks: int = 0  # of a node's SSD, behind its share of the pool
    ssd_gbyte_s: float = 0.0  # of an SSD; 0 = the model's
    block_tokens: int = 512  # as in the traces
    chunk_tokens: int = 0  # of a step; 0 = the model's
    batching: str = "decode-first"  # sched/batching.py: what of them prompts may have
    prefill_chunk_tokens: int = 256  # with batching mixed
    tbt_budget_s: float = 0.1  # with batching dynamic
    step_prompts: int = 1  # that may share a step; nodes have no limit
    contention: float = 0.0  # by how much a step is longer while another node computes: nodes of one machine
    nic_gbit_s: float = 0.0  # 0 = the model's
    kv_overlap: Literal["layer", "none"] = "layer"  # KV moves while the prompt is computed, or behind it
    publish: Literal["none", "home"] = "none"  # whether new blocks cross the network to their homes
    kv_scale: float = 1.0  # bytes on the wire and in the pool per byte of KV: 0.5 = 8-bit blocks
    gossip_s: float = 0.1  # between two records of a node
    delivery_s: float = 0.03  # until a record is everywhere
    digest_s: float = 1.0  # until others know what a node holds
    probe_s: float = 0.5e-3  # a question to a node and its answer
    lookup_s: float = 0.5e-3  # asking the pool for a prompt's blocks, in addition to the questions to the nodes
    cell_nodes: int = 0  # most nodes of a cell, see sched/gossip/cells.py; 0 = one cell
    cell_s: float = 2.0  # until a change of a cell's load is known in the others
    entry_skew: float = 0.0  # share of the requests that come to acceptors of the first cell only
    intents: bool = True  # prefixes that are being computed are announced, see sched/gossip/intents.py
    decode_ahead: bool = True  # decode nodes that are asked tell their step with what is promised to them
    links: str = "exact"  # what is known of transfers, see lab/simulator/links.py
    threshold: float = 1.5  # kvcache balancing threshold
    max_waiting: int = 100_000  # prompts of a node, then it refuses
    rejection: str = "none"  # or stage-load, early, predicted (sched/rejection.py)
    recheck: bool = False  # the decode node looks at the time per token again when a prompt has come
    slo: str = ""  # objectives other than the classes' own: interactive:ttft=0.5,tbt=0.1;batch:ttft=60
    slo_scale: float = 1.0  # of the objectives that it judges by
    tbt_slo_scale: float = 0.0  # of the time per token; 0 = slo_scale
    predictor: str = "factors"  # of --placement mooncake-learned: factors, perfect, noisy, inverted
    predictor_noise: float = 0.3  # standard deviation of the logarithm
    guard_slack: float = 1.25  # width of the envelope
    guard_most_error: float = 0.3  # moving relative error from which the predictor is not believed
    faults: str = ""  # lab/simulator/faults.py: crash:NODE@AT+SECONDS, slow:NODE@AT+SECONDSxFACTOR
    crash_every_s: float = 0.0  # a node crashes, by seed; 0 = never
    crash_down_s: float = 30.0  # until it is back
    detect_s: float = 1.0  # until a crash or a slow node is known
    retry_s: float = 0.2  # between two tries of a request that met a dead node
    gossip_loss: float = 0.0  # share of the records that a round does not bring
    role_changes: bool = False  # all nodes can prefill and decode, and change (lab/simulator/roles.py)
    role_hold_s: float = 15.0  # how long another layout must be wanted before a node changes
    seed: int = 0  # of arrivals, draws, faults

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
