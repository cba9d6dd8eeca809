"""All parameters of a run except its requests; written into every result."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from lab.simulator.fabric.tree import FatTree
from sched.classes import with_objectives
from sched.scaling.bounds import parse

LEAST = {
    "block_tokens": 1, "prefill_chunk_tokens": 1, "step_prompts": 1, "max_waiting": 1, "threshold": 1, "guard_slack": 1
}  # fmt: skip
"""The least value of a number; of all others 0."""
ABOVE_ZERO = {
    "kv_scale", "gossip_s", "digest_s", "cell_s", "retry_s", "crash_down_s", "slo_scale", "scale_out_s", "scale_in_s"
}  # fmt: skip
AT_MOST_ONE = {"entry_skew"}
BELOW_ONE = {"gossip_loss", "prefill_share"}
ENDLESS = {"threshold", "guard_slack", "guard_most_error"}  # may be inf


KINDS = "prefill", "decode", "mixed"
"""Roles of simulated nodes; also the names of the fields with their number."""

IDEAL: dict[str, Any] = {
    "publish": "none", "links": "exact", "step_models": "exact", "step_noise": 0.0, "output_lengths": "oracle"
}  # fmt: skip
"""A cluster that publishes for nothing and knows everything, for questions about the mechanisms alone; no default."""

FAILING = "--faults, --crash-every-s, --rank-loss-every-s"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimConfig:
    """Nodes are `prefill` + `decode`, or `mixed` ones; each has one KV arena of `kv_blocks`, for its requests and for
    the prefixes that it keeps, and a share of the pool of `pool_blocks`, with `ssd_blocks` behind it. Times in
    seconds."""

    # a preset of lab/simulator/models/step_models.py, or a file that scripts/tools.py validate wrote
    model: str = "llama3-70b-8xa800"
    model_geometry: str = ""  # step times by formula instead: a published model or a Hugging Face directory
    hardware: str = "8xh200"  # of a node with --model-geometry, see lab/simulator/models/by_formula.py
    expert_ranks: int = 0  # GPUs of a node that share the experts, with --model-geometry; 0 = even load, at no cost
    expert_copies: int = 1  # of each expert, on different ranks
    pool_windows: bool = True  # the pool keeps blocks of layers with a window, with --model-geometry
    state_every: int = 8  # blocks from one pooled state to the next, for models with a state
    prefill: int = 8  # nodes that compute prompts
    decode: int = 8  # nodes that decode
    mixed: int = 0  # nodes that do both
    store: int = 0  # nodes that only keep the pool, all of it; 0 = the other nodes have equal shares of it
    placement: str = "mooncake"  # see sched/placement/table.py
    queue_order: str = "fcfs"  # fcfs, edf, srpt or weighted-fair (sched/queueing.py)
    eviction: str = "lru"  # see cache/pool/policies/
    kv_blocks: int = 0  # blocks of a node's KV arena (--kv-cache-bytes of nodes); 0 = those of the model's memory
    cache_blocks: int = 1_000_000  # most blocks of an arena that keep prefixes no request uses; 0 = none
    pool_blocks: int = 0  # blocks of a node's share of the pool
    ssd_blocks: int = 0  # blocks of a node's SSD, behind its share of the pool
    ssd_gbyte_s: float = 0.0  # bandwidth of an SSD; 0 = the model's
    pool_model: str = "auto"  # pool and arenas: real (classes of production), fast, or auto: real up to 64 nodes
    gossip_model: str = "fast"  # digests and membership: fast (digest_s, detect_s), or real (the cores of production)
    cache_admission: str = "always"  # which blocks a full share accepts, see cache/pool/admission.py
    session_parking: bool = False  # blocks of sessions by their predicted return, with pool_model real
    session_raising: bool = True  # with session_parking, blocks come up from SSD before a predicted return
    block_tokens: int = 512  # tokens of a block, as in the traces
    chunk_tokens: int = 0  # prompt tokens of a step; 0 = the model's
    batching_policy: str = "decode-first"  # how prompts share a step's tokens, see sched/batching.py
    prefill_chunk_tokens: int = 256  # prompt tokens of a step with batching-policy mixed
    tbt_budget_s: float = 0.1  # time between tokens to keep with batching-policy dynamic; 0 = by the objectives
    max_step_s: float = 0.0  # maximum time of a step with prompts (--max-step-ms of nodes); 0 = none
    step_prompts: int = 1  # prompts that may share a step; real nodes have no limit
    heavy_chunk_tokens: int = 0  # --prefill-chunk-tokens of the prefill-heavy nodes (--placement taichi); 0 = of all
    prefill_share: float = 0.0  # prefill-I and decode-I halve a GPU, its memory too (rivals/nexus.py); 0 = none
    contention: float = 0.0  # relative slowdown of a step while another node of the machine computes
    nic_gbit_s: float = 0.0  # bandwidth of a NIC; 0 = the model's
    fat_tree: str = ""  # NODESxHOSTSxRACKS[:RACK_RATIO[:POD_RATIO]], see lab/simulator/fabric/tree.py; "" = one switch
    flow_order: Literal["fair", "deadline"] = "fair"  # of flows on a link of --fat-tree: hand-over, fetch, publish
    known_places: bool = True  # nodes tell their places in --fat-tree (--network-place)
    kv_overlap: Literal["layer", "none"] = "layer"  # KV moves while the prompt is computed, or after it
    reservations: bool = False  # a prompt is computed once its decode node has room for its KV, as on real nodes
    publish: Literal["none", "home"] = "home"  # whether new blocks cross the network to their homes
    kv_scale: float = 1.0  # bytes on the wire and in the pool per byte of KV: 0.5 = 8-bit blocks
    gossip_s: float = 0.1  # between two records of a node
    delivery_s: float = 0.03  # time until all nodes have a record
    digest_s: float = 1.0  # time until others know which blocks a node holds, with gossip_model fast
    probe_s: float = 0.5e-3  # a question to a node and its answer
    lookup_s: float = 0.5e-3  # time to ask the pool for a prompt's blocks, in addition to the probes
    cell_nodes: int = 0  # maximum nodes of a cell, see sched/gossip/cells.py; 0 = one cell
    cell_s: float = 2.0  # time until other cells know a change of a cell's load
    entry_skew: float = 0.0  # share of the requests that arrive at the first cell only
    tolls: bool = True  # of prompts and decodes on mixed nodes, see sched/placement/view.py
    intents: bool = True  # prefixes that are being computed are announced, see sched/gossip/intents.py
    decode_ahead: bool = True  # probed decode nodes include promised requests in their step time
    links: str = "rails"  # knowledge of transfer times, see lab/simulator/links.py
    step_models: str = "learnt"  # knowledge of step times, see lab/simulator/models/costs.py
    step_noise: float = 0.05  # standard deviation of the logarithm of a step's time
    output_lengths: str = "limit"  # what is known of answers: limit, mean or oracle (lab/simulator/lengths.py)
    threshold: float = 1.5  # kvcache balancing threshold
    max_waiting: int = 100_000  # waiting prompts at which a node refuses
    rejection: str = "none"  # none, stage-load, early or predicted (sched/rejection.py)
    recheck: bool = False  # the decode node checks the time per token again when a prompt arrives
    slo: str = ""  # objectives other than the classes' own: interactive:ttft=0.5,tbt=0.1;batch:ttft=60
    slo_scale: float = 1.0  # factor on the objectives used for rejection
    tbt_slo_scale: float = 0.0  # factor on the time per token; 0 = slo_scale
    predictor: str = "factors"  # for --placement mooncake-learned: factors, perfect, noisy, inverted
    predictor_noise: float = 0.3  # standard deviation of the logarithm
    guard_slack: float = 1.25  # width of the envelope
    guard_most_error: float = 0.3  # the predictor is ignored from this moving relative error on
    faults: str = ""  # lab/simulator/faults.py: crash:NODE@AT+SECONDS, slow:NODE@AT+SECONDSxFACTOR
    rank_loss_every_s: float = 0.0  # mean time between losses of a rank of any node, drawn by seed; 0 = never
    rank_down_s: float = 60.0  # time until a lost rank is back
    crash_every_s: float = 0.0  # mean time between crashes, drawn by seed; 0 = never
    crash_down_s: float = 30.0  # time until a crashed node is back
    detect_s: float = 1.0  # time until a slow node is known, and, with gossip_model fast, a crash
    retry_s: float = 0.2  # pause between tries of a request that met a dead node
    gossip_loss: float = 0.0  # share of the records that a gossip round loses
    migration: Literal["none", "balance"] = "none"  # running requests move between decode nodes: sched/migration.py
    role_changes: bool = False  # nodes can do both and change roles, see lab/simulator/roles.py
    role_policy: str = "threshold"  # when they change them, see sched/role_ratio.py
    role_hold_s: float = 15.0  # time for which another layout must be better before a node changes
    autoscale: str = ""  # roles whose nodes start and leave with the load: prefill=2..8,decode=2..8 (sched/scaling/)
    scale_start_s: float = 60.0  # time from the decision for a node until it is ready
    scale_out_s: float = 10.0  # time for which more nodes must be needed before one starts
    scale_in_s: float = 300.0  # time for which fewer nodes must be needed before one leaves
    node_classes: str = ""  # unlike nodes: ROLE:COUNT:SPEED:COST,... for the first COUNT of a role
    prefill_cost: float = 1.0  # cost of a node that computes prompts, per hour
    decode_cost: float = 1.0  # cost of a node that decodes, or does both, per hour
    seed: int = 0  # seed of arrivals, draws, faults

    def __post_init__(self) -> None:
        """Raises ValueError naming the flag of a number that cannot be."""
        for name, value in self.as_dict().items():
            if isinstance(value, int | float) and not isinstance(value, bool) and (wanted := _missed(name, value)):
                raise ValueError(f"--{name.replace('_', '-')} must be {wanted}, got {value}")
        try:
            with_objectives(self.slo)
        except ValueError as error:
            raise ValueError(f"--slo {self.slo}: {error}") from None
        if self.fat_tree:
            try:
                FatTree.parse(self.fat_tree)
            except ValueError as error:
                raise ValueError(f"--fat-tree {error}") from None
        elif self.flow_order != "fair":
            raise ValueError(f"--flow-order {self.flow_order} needs --fat-tree")
        if self.autoscale:
            _check_autoscale(self)
        if self.rank_loss_every_s and not self.expert_ranks:
            raise ValueError(f"--rank-loss-every-s {self.rank_loss_every_s:g} needs --expert-ranks")
        if self.store and (self.fails or self.autoscale):
            raise ValueError(f"--store does not work with {FAILING} or --autoscale: give --store 0")
        if self.migration != "none" and (self.fails or self.autoscale or self.role_changes):
            others = f"{FAILING}, --autoscale or --role-changes"
            raise ValueError(f"--migration {self.migration} does not work with {others}: give --migration none")
        node_classes(self.node_classes)
        if not (self.mixed or (self.prefill and self.decode)):
            raise ValueError("no node computes prompts, or none decodes: give --prefill and --decode, or --mixed")

    @property
    def fails(self) -> bool:
        """Whether nodes or parts of them fail."""
        return bool(self.faults or self.crash_every_s or self.rank_loss_every_s)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class NodeClass:
    """Nodes with another speed and price than the model's and the role's."""

    role: str  # prefill, decode or mixed
    count: int
    speed: float  # 0.5 = every step takes twice as long
    cost: float  # per hour


def node_classes(text: str) -> dict[str, NodeClass]:
    """By role, from --node-classes. Raises ValueError."""
    found: dict[str, NodeClass] = {}
    for part in filter(None, text.split(",")):
        try:
            role, count, speed, cost = part.split(":")
            one = NodeClass(role.strip(), int(count), float(speed), float(cost))
        except ValueError:
            raise ValueError(
                f"--node-classes {part!r} is not ROLE:COUNT:SPEED:COST, such as decode:4:0.5:0.3"
            ) from None
        if one.role not in KINDS or one.role in found:
            raise ValueError(f"--node-classes {part!r}: name each of {', '.join(KINDS)} at most once")
        if one.count < 0 or not 0 < one.speed < math.inf or not 0 <= one.cost < math.inf:
            raise ValueError(f"--node-classes {part!r}: COUNT and COST are at least 0, SPEED is above 0")
        found[one.role] = one
    return found


def _check_autoscale(config: SimConfig) -> None:
    try:
        bounds = parse(config.autoscale)
    except ValueError as error:
        raise ValueError(f"--autoscale {config.autoscale}: {error}") from None
    if strange := [one.role for one in bounds if one.role not in KINDS]:
        raise ValueError(f"--autoscale {config.autoscale}: {strange[0]} is none of {', '.join(KINDS)}")
    for one in bounds:
        if not one.least <= getattr(config, one.role) <= one.most:
            raise ValueError(f"--{one.role} must be between {one.least} and {one.most}, as --autoscale says")
    if config.role_changes or config.fails:
        raise ValueError(f"--autoscale does not work with --role-changes, {FAILING}")
    if config.reservations:
        raise ValueError("--autoscale does not work with --reservations: a node may leave before its prompt comes")
    if config.gossip_model == "real":
        raise ValueError("--autoscale does not work with --gossip-model real: its nodes are members from the start")
    if config.prefill_share:
        raise ValueError("--autoscale does not work with --prefill-share: the halves of a node cannot leave alone")


def _missed(name: str, value: float) -> str:
    """The rule that this value breaks; empty if none."""
    if math.isnan(value) or (math.isinf(value) and name not in ENDLESS):
        return "a finite number"
    if name in ABOVE_ZERO and value <= 0:
        return "above 0"
    if value < (least := LEAST.get(name, 0)):
        return f"at least {least}"
    if name in BELOW_ONE and value >= 1:
        return "below 1"
    return "at most 1" if name in AT_MOST_ONE and value > 1 else ""
