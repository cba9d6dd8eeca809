"""One frozen Config for a node; its flags are generated from its fields in engine/config/flags.py.

If vLLM has a flag, this uses vLLM's name. Names contain units. `engine.config.resolve` resolves 'auto' and None once,
into a new Config, which is printed at start and written into every result file.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.config.field import flag
from engine.config.model import EMBEDDED_MODEL
from engine.config.scaling import ScalingFields
from net.transfer.engine import transports
from sched.classes import CLASSES, ServiceClass, spell, with_objectives
from sched.placement.table import placements
from sched.queueing import queue_orders
from sched.rejection import rejections
from sched.role_ratio import role_policies

__all__ = ["ACCEPTOR", "EMBEDDED_MODEL", "NO_MODEL", "ROLES", "Config"]

NO_MODEL = "none"
"""No model: a store node that keeps values of up to --value-bytes for any client."""

ROLES = ("prefill", "decode", "store")

ACCEPTOR = "acceptor"
"""The role of a node with --backend: it takes requests, and computes and stores nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(ScalingFields):
    """All settings of a node: the node and its model (ModelFields), the cache (CacheFields), the nodes that start and
    leave (ScalingFields), and the cluster. Does not validate: `engine.config.flags` and `engine.config.resolve` do."""

    # --- scheduling
    backend: str | None = flag(
        None,
        "scheduling",
        "a worker of vLLM, or a node of ours, to which this node sends requests; it then computes nothing itself: "
        "http://HOST:PORT, or http://HOST:PORT,events=tcp://HOST:PORT,replay=tcp://HOST:PORT to follow its prefixes; "
        "give it once per worker",
        unit="url",
        several=True,
    )
    placement: str = flag(
        "mooncake",
        "scheduling",
        "how to choose prefill and decode nodes: mooncake = Algorithm 1 over a shortlist of nodes that it asks; "
        "mooncake-central-greedy = over all nodes, like the paper's Conductor; mooncake-learned = mooncake "
        "corrected by measured times to first token, within 1.25 of the best estimate; mooncake-cost = the cheapest "
        "node of those that meet the targets of --slo, by --node-cost; or your own: FILE.py:NAME",
        tuple(placements),
        file=True,
    )
    placement_tolls: bool = flag(
        True,
        "scheduling",
        "on nodes that prefill and decode, --placement mooncake keeps prompts and decodes apart while there is room, "
        "because they delay each other; that moves KV more often, so turn it off where a hand-over takes seconds",
    )
    kvcache_balancing_threshold: float = flag(
        1.5,
        "scheduling",
        "placement considers a fetch only if the pool's prefix is longer than the node's own prefix by this factor",
        unit="ratio",
        least=1.0,
    )
    prefix_intents: bool = flag(
        True, "scheduling", "announce a new prefix before computing it, so that a burst of requests computes it once"
    )
    prefill_parallel: str = flag(
        "none",
        "scheduling",
        "whether several prefill nodes compute one long prompt: none; cpp = chunked pipeline: each node computes some "
        "of the layers, for one chunk while the others compute other chunks; cp = context parallel: each node computes "
        "some of the chunks and gets the KV of the others layer by layer. The node that accepts the request decides",
        ("none", "cpp", "cp"),
    )
    cpp_min_tokens: int = flag(
        4096,
        "scheduling",
        "shortest prompt, without the part that is known, for --prefill-parallel cpp or cp",
        unit="tokens",
        least=2,
    )
    cpp_max_nodes: int = flag(
        4,
        "scheduling",
        "maximum number of nodes that compute one prompt with --prefill-parallel cpp or cp",
        unit="nodes",
        least=2,
    )
    cpp_min_gain: float = flag(
        0.1,
        "scheduling",
        "share of the estimated time to first token that several nodes must save with --prefill-parallel cpp or cp; "
        "-100 = always use them",
        unit="ratio",
        least=-100,
        most=0.99,
    )
    rejection: str = flag(
        "none",
        "scheduling",
        "which requests get 429 before queues are full: none; stage-load = each stage rejects by its own load; "
        "early = by the load of both stages at arrival; predicted = at arrival, by the predicted decode load; or your "
        "own: FILE.py:NAME",
        tuple(rejections),
        file=True,
    )
    slo: str = flag(
        spell(CLASSES),
        "scheduling",
        "target time to first token (ttft) and between tokens (tbt) of each class, in seconds, for --rejection, "
        "--queue-order and --placement; values that you leave out keep their defaults; give all nodes the same targets",
        unit="CLASS:ttft=S,tbt=S;...",
    )
    slo_scale: float = flag(1.0, "scheduling", "factor on the targets of --slo for --rejection", least=0.001)
    calibration_ms: int = flag(
        500,
        "scheduling",
        "time at start for test steps that measure the speed of this machine for the estimates; a node without "
        "requests repeats a few of them now and then (at most 1% of its time) and measures again if they took "
        "otherwise; 0 = learn from requests alone",
        least=0,
    )
    calibration_cache: str = flag(
        "auto",
        "scheduling",
        "directory that keeps the measured steps of a start for the next one, which runs two of them again, and all "
        "if these take otherwise; auto = mooncake/calibration in the user's cache directory, off = measure "
        "at every start",
    )
    first_role: str = flag(
        "both",
        "scheduling",
        "what a node with roles prefill and decode accepts: both, or one of them at first; it switches when the "
        "other stage needs more nodes",
        ("both", "prefill", "decode"),
    )
    role_policy: str = flag(
        "threshold",
        "scheduling",
        "when a node of --first-role switches: threshold = a stage is busy, and the other one can spare a node; dopd = "
        "the ratio of prefill to decode nodes is not that of their predicted loads",
        tuple(role_policies),
    )
    role_change_hold_ms: int = flag(
        15_000,
        "scheduling",
        "time for which a stage must need nodes before a node of --first-role switches; the cluster waits twice "
        "this time between two switches, and each node waits eight times as long between its own",
        least=1,
    )
    migration: str = flag(
        "drain",
        "scheduling",
        "when a running request moves to another decode node, its KV copied while it decodes: none; drain = when this "
        "node leaves; balance = also when another decode node has much less load, and before blocks run out here",
        ("none", "drain", "balance"),
    )
    queue_order: str = flag(
        "edf",
        "scheduling",
        "order of waiting prompts: fcfs = first come, first served; edf = earliest deadline of the class; srpt = "
        "shortest first, with aging; weighted-fair = shares by class; or your own: FILE.py:NAME",
        tuple(queue_orders),
        file=True,
    )

    # --- transfer
    transport: str = flag(
        "auto",
        "transfer",
        "how to move KV between nodes; auto = the first that works of shm (within one host), rdma, tcp; rdma or tcp = "
        "that one, also within one host. Messages to ranks of experts on other hosts go by rdma or tcp: auto = rdma "
        "where both sides have it, shm = tcp",
        ("auto", *transports),
    )
    rail_limit: int = flag(
        0,
        "transfer",
        "maximum bytes per second of the transfers that this node submits, to study overlap; 0 = no limit",
        unit="bytes/s",
        least=0,
    )
    tcp_connections: int = flag(
        2,
        "transfer",
        "number of connections to each peer for TCP transfers, and as many again for urgent transfers",
        least=1,
    )
    tcp_busy_poll_us: int = flag(
        100,
        "transfer",
        "maximum time for which the event loop polls for the next bytes of a TCP transfer instead of sleeping; it "
        "polls only while that saves time; 0 = always sleep",
        unit="us",
        least=0,
        most=10_000,
    )
    tcp_congestion: str = flag(
        "auto",
        "transfer",
        "congestion control of the TCP connections that carry KV; auto = reno within a host, the kernel's default "
        "between hosts",
    )
    wire_codec: str = flag(
        "none",
        "transfer",
        "lossless coder of KV that this node sends and takes over TCP, if the other node has one too: exponent = code "
        "the exponents of its floats in fewer bits; auto = the same, where the measured link is so slow that this "
        "saves time; none = KV travels as it is",
        ("none", "exponent", "auto"),
    )
    kv_transfer: str = flag(
        "push",
        "transfer",
        "which side moves a prompt's KV: push = the prefill node writes it to the decode node; pull = the decode "
        "node reads it",
        ("push", "pull"),
    )
    kv_overlap: str = flag(
        "layer",
        "transfer",
        "when to move a prompt's KV: layer = each layer while the node computes the next; chunk = after each chunk "
        "of the prompt; none = at its end. With layer, a cached prefix also loads while the node uses it, if no "
        "other request has to wait for that",
        ("layer", "chunk", "none"),
    )
    rdma_devices: str = flag(
        "auto",
        "transfer",
        "RDMA devices in the order of the rails, joined by commas; the first devices of all nodes form one rail; "
        "auto = all devices",
        unit="names",
    )
    rdma_gid_index: int = flag(
        -1,
        "transfer",
        "GID index of the RDMA devices (show_gids lists them); auto = RoCE v2 over IPv4 if available",
        unit="index",
        least=0,
        most=255,
        auto=-1,
    )
    rdma_plaintext: bool = flag(
        False,
        "transfer",
        "allow KV and messages to ranks of experts over RDMA, which neither encrypts nor authenticates them, although "
        "--cluster-key-file is set; off = use TCP, which does both",
    )
    topology_file: str | None = flag(
        None,
        "transfer",
        "file that says which RDMA devices are close to which memory and which form one rail "
        "(net/transfer/common/topology.py); none = read sysfs",
    )

    # --- api
    api_key: str | None = flag(None, "api", "key that clients must send as 'Authorization: Bearer KEY'; none = open")
    record_trace: str | None = flag(
        None,
        "api",
        "append each request that this node accepted to this file when it ends, as one line in Mooncake's trace "
        "format: times, lengths, and numbers for blocks of 512 tokens; no text",
        unit="file",
    )
    otlp_traces_endpoint: str | None = flag(
        None,
        "api",
        "OpenTelemetry collector (OTLP over HTTP, http://HOST:4318) that gets the timeline of each request this "
        "node accepted, as one trace over all its nodes; a client's traceparent continues that client's trace; "
        "needs the extra otlp",
        unit="url",
    )
    api_key_file: str | None = flag(
        None,
        "api",
        "file with more keys of clients, one per line, reread when it changes; a joining node sends --api-key, or "
        "if that is not set the first of these; none = only --api-key",
        unit="file",
    )
    batch_path: str | None = flag(
        None,
        "api",
        "folder of this node for /v1/files and /v1/batches: files of requests, their progress and their answers, which "
        "outlive the node; none = it has no batches",
        unit="folder",
    )
    batch_concurrency: int = flag(
        32, "api", "maximum number of requests of batches that this node answers at once", unit="requests", least=1
    )
    allowed_origins: str | None = flag(
        None,
        "api",
        "other web origins whose pages may call this node from a browser (CORS), joined by commas, * = all; none = "
        "no other origin",
        unit="origins",
    )
    rate_limit: float = flag(
        0.0,
        "api",
        "maximum POST requests per second and key (without keys: per address); further requests get 429; 0 = no limit",
        least=0,
    )
    max_connections: int = flag(
        4096,
        "api",
        "maximum number of open HTTP connections; a new connection replaces an idle one, or gets 503 if all are "
        "busy, except for /health",
        least=1,
    )
    read_timeout_ms: int = flag(30_000, "api", "maximum wait for the head of a request, and for its body", least=100)
    max_body_bytes: int = flag(8 << 20, "api", "longest request body; longer ones get 413", least=1024)
    unknown_fields: str = flag(
        "ignore",
        "api",
        "fields of a request that this server does not know: ignore = the answer's header X-Ignored-Fields names them; "
        "refuse = 400",
        ("ignore", "refuse"),
    )
    trust_request_chat_template: bool = flag(
        False,
        "api",
        "serve chat_template of request bodies; a template runs in a sandbox, but may compute for ever, so only for "
        "clients that you trust; off = 400",
    )
    max_answer_logprobs: int = flag(
        250_000,
        "api",
        "maximum number of log probabilities in one answer that is not streamed: tokens x choices x (1 + "
        "alternatives); requests for more get 400",
        unit="values",
        least=1000,
    )
    max_header_bytes: int = flag(
        16 << 10, "api", "longest request line, and longest header; longer ones get 400", least=1024, most=1 << 20
    )
    request_timeout_ms: int = flag(
        600_000, "api", "maximum lifetime of a request; the node aborts it after that", least=1
    )
    role_wait_ms: int = flag(
        30_000,
        "api",
        "how long a new request waits for a node of a missing role before it gets 503; a request that has begun "
        "waits until --request-timeout-ms",
        least=0,
    )
    drain_timeout_ms: int = flag(
        5000,
        "api",
        "how long requests in progress may continue after SIGTERM or Ctrl-C; a second signal ends them",
        least=0,
    )

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles in canonical order; 'mixed' is expanded."""
        named = {part.strip() for part in self.role.split(",")}
        return ROLES if "mixed" in named else tuple(role for role in ROLES if role in named)

    @property
    def computes(self) -> bool:
        """Whether the node has an engine, which runs the model."""
        return "prefill" in self.roles or "decode" in self.roles

    @property
    def shares_experts(self) -> bool:
        """Whether the node has no experts itself, and all ranks that have them may answer other nodes too."""
        return 1 < self.expert_parallel_size == self.expert_remote_ranks

    @property
    def classes(self) -> dict[str, ServiceClass]:
        """The service classes with the objectives of --slo; `engine.config.flags` has checked them."""
        return with_objectives(self.slo)

    @property
    def pooled_per_block(self) -> int:
        """Blocks of the pool in a block of this node's arena; `cluster_block_size` may still be auto."""
        return max(1, self.block_size // self.cluster_block_size)
