"""One frozen Config for a node; its flags are generated from its fields in engine/flags.py.

vLLM's spelling wherever vLLM has the flag. Units are in the names. 'auto' and None are resolved once, by
`engine.resolve`, into a new Config, which is printed at start and written into every result file.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.config_cache import CacheConfig
from engine.config_field import flag
from engine.config_model import EMBEDDED_MODEL
from net.transfer import transports
from sched.classes import CLASSES, ServiceClass, spell, with_objectives
from sched.placements.table import placements
from sched.queueing import queue_orders
from sched.rejection import rejections

__all__ = ["EMBEDDED_MODEL", "NO_MODEL", "ROLES", "Config"]

NO_MODEL = "none"
"""Instead of a model: a store node that keeps values of --value-bytes for whoever asks."""

ROLES = ("prefill", "decode", "store")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(CacheConfig):
    """Everything a node is told at start: the node and its model (ModelConfig), where KV is kept (CacheConfig), and the
    cluster. Raises nothing: `engine.flags` and `engine.resolve` validate."""

    # --- scheduling
    placement: str = flag(
        "mooncake",
        "scheduling",
        "how prefill and decode nodes are chosen: mooncake = Algorithm 1 over a shortlist that is asked; "
        "mooncake-central-greedy = over all nodes, as the paper's Conductor; mooncake-learned = mooncake corrected by "
        "measured times to first token, within 1.25 of the best estimate; or your own: FILE.py:NAME",
        tuple(placements),
        file=True,
    )
    kvcache_balancing_threshold: float = flag(
        1.5,
        "scheduling",
        "how many times longer than the node's own prefix the pool's must be before placement considers to fetch it",
        unit="ratio",
        least=1.0,
    )
    prefix_intents: bool = flag(
        True,
        "scheduling",
        "announce a new prefix that is about to be computed, so that a burst of it is computed once",
    )
    rejection: str = flag(
        "none",
        "scheduling",
        "who gets 429 beside full queues: nobody, by each stage's own load, early by both, or by both as predicted",
        tuple(rejections),
    )
    slo: str = flag(
        spell(CLASSES),
        "scheduling",
        "seconds to the first token (ttft) and between tokens (tbt) that each class wants: --rejection and "
        "--queue-order go by it; what is not named keeps its default; give all nodes the same",
        unit="CLASS:ttft=S,tbt=S;...",
    )
    slo_scale: float = flag(1.0, "scheduling", "multiplies what --slo says for --rejection", least=0.001)
    calibration_ms: int = flag(
        500,
        "scheduling",
        "time at start for steps that teach the estimates this machine's speed; 0 = learn from requests",
        least=0,
    )
    first_role: str = flag(
        "both",
        "scheduling",
        "what a node that prefills and decodes takes: both; or it begins with one and changes over when the other "
        "stage is short of nodes",
        ("both", "prefill", "decode"),
    )
    role_change_hold_ms: int = flag(
        15_000,
        "scheduling",
        "how long a stage must be short before a node of --first-role changes over; two of these between two changes, "
        "eight per node",
        least=1,
    )
    queue_order: str = flag(
        "edf",
        "scheduling",
        "whose prompt is next: first come, earliest deadline of its class, shortest (aged), or shares by class",
        tuple(queue_orders),
    )

    # --- transfer
    transport: str = flag(
        "auto",
        "transfer",
        "how KV moves between nodes; auto = the first that works of shm (one host), rdma, tcp",
        ("auto", *transports),
    )
    rail_limit: int = flag(
        0,
        "transfer",
        "hold transfers that this node submits back to so many bytes per second, to study overlap; 0 = no limit",
        unit="bytes/s",
        least=0,
    )
    tcp_connections: int = flag(
        2,
        "transfer",
        "connections to each peer over which TCP transfers are striped, and as many for urgent ones",
        least=1,
    )
    tcp_busy_poll_us: int = flag(
        100,
        "transfer",
        "how long the event loop may stay awake for the next bytes of a TCP transfer instead of sleeping, as long as "
        "that pays; 0 = it sleeps",
        unit="us",
        least=0,
        most=10_000,
    )
    tcp_congestion: str = flag(
        "auto",
        "transfer",
        "congestion control of the TCP connections on which KV moves; auto = reno within a host, the kernel's default "
        "between hosts",
    )
    kv_transfer: str = flag(
        "push",
        "transfer",
        "who moves a prompt's KV: the prefill node writes it to the decode node, or the decode node reads it",
        ("push", "pull"),
    )
    kv_overlap: str = flag(
        "layer",
        "transfer",
        "when a prompt's KV moves: each layer while the next is computed, each chunk of the prompt, or all at its end; "
        "with layer a found prefix also arrives while it is used, where nobody else has to wait for it",
        ("layer", "chunk", "none"),
    )
    rdma_devices: str = flag(
        "auto",
        "transfer",
        "RDMA devices in the order of the rails, joined by commas: the first of each node are one rail; auto = all",
        unit="names",
    )
    rdma_gid_index: int = flag(
        -1,
        "transfer",
        "GID of the RDMA devices (show_gids lists them); auto = RoCE v2 over IPv4 where there is one",
        unit="index",
        least=0,
        most=255,
        auto=-1,
    )
    rdma_plaintext: bool = flag(
        False,
        "transfer",
        "with --cluster-key-file: let KV go by RDMA all the same, which neither encrypts nor authenticates it; off = "
        "TCP, which does",
    )
    topology_file: str | None = flag(
        None,
        "transfer",
        "file on which RDMA devices are near which memory and which are one rail (net/topology.py); none = read sysfs",
    )

    # --- api
    api_key: str | None = flag(None, "api", "clients must send it as 'Authorization: Bearer KEY'; none = open")
    record_trace: str | None = flag(
        None,
        "api",
        "append every request this node accepted to this file when it ends, as a line of a trace in Mooncake's format: "
        "times, lengths, and numbers for blocks of 512 tokens; no text",
        unit="file",
    )
    otlp_traces_endpoint: str | None = flag(
        None,
        "api",
        "send the timeline of every request this node accepted to this OpenTelemetry collector (OTLP over HTTP, "
        "http://HOST:4318) as one trace over its nodes, the client's if it sends traceparent; needs the extra otlp",
        unit="url",
    )
    api_key_file: str | None = flag(
        None,
        "api",
        "more keys of clients, one a line; read again when it changes; a node that joins sends --api-key, or without "
        "it the first of these; none = only that",
        unit="file",
    )
    allowed_origins: str | None = flag(
        None,
        "api",
        "web pages of other origins that may call from a browser (CORS), joined by commas, * = all; none = no page",
        unit="origins",
    )
    rate_limit: float = flag(
        0.0, "api", "POST requests per second and key (without keys: and address) before 429; 0 = no limit", least=0
    )
    max_connections: int = flag(
        4096,
        "api",
        "open HTTP connections; a new one takes the place of one that waits, and gets 503 when all are at work, but to "
        "/health",
        least=1,
    )
    read_timeout_ms: int = flag(30_000, "api", "longest wait for the head of a request, and for its body", least=100)
    max_body_bytes: int = flag(8 << 20, "api", "longest request body; longer ones get 413", least=1024)
    max_answer_logprobs: int = flag(
        250_000,
        "api",
        "log probabilities in one whole answer: tokens x choices x (1 + others beside each); more get 400",
        unit="values",
        least=1000,
    )
    max_header_bytes: int = flag(
        16 << 10, "api", "longest request line, and longest header; longer ones get 400", least=1024, most=1 << 20
    )
    request_timeout_ms: int = flag(600_000, "api", "longest life of a request before it is aborted", least=1)
    role_wait_ms: int = flag(
        30_000,
        "api",
        "how long a new request waits while no node of a role that it needs is there, before 503; one that has begun "
        "waits until --request-timeout-ms",
        least=0,
    )
    drain_timeout_ms: int = flag(
        5000,
        "api",
        "how long requests in progress may go on after SIGTERM or Ctrl-C; a second signal ends them",
        least=0,
    )

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles in canonical order, 'mixed' spelt out."""
        named = {part.strip() for part in self.role.split(",")}
        return ROLES if "mixed" in named else tuple(role for role in ROLES if role in named)

    @property
    def classes(self) -> dict[str, ServiceClass]:
        """The service classes with the objectives of --slo, which `engine.flags` has checked."""
        return with_objectives(self.slo)
