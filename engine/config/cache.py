"""The part of Config for the cache: where KV is stored, in which format, and for how long."""

from __future__ import annotations

from dataclasses import dataclass

from cache.block import encodings, pool_types
from cache.pool.admission import admissions
from cache.pool.policies import policies
from cache.ssd import backends
from engine.config.field import flag
from engine.config.model import ModelFields


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFields(ModelFields):
    block_size: int = flag(
        16,
        "cache",
        "tokens per block of this node's KV arena, the unit of allocation and transfer: a multiple of "
        "--cluster-block-size; on an H100 or H200, blocks of 64 or 128 are copied whole when long prompts are computed",
        unit="tokens",
        least=1,
        most=4096,
    )
    cluster_block_size: int = flag(
        -1,
        "cache",
        "tokens per block of the pool and per block key, the same on all nodes of a cluster; it divides every "
        "--block-size; auto = that of the cluster to join, otherwise --block-size",
        unit="tokens",
        least=1,
        most=4096,
        auto=-1,
    )
    kv_cache_dtype: str = flag(
        "auto",
        "cache",
        "KV element type in this node's arena, and of KV that it is sent; auto = the cluster's type if that is "
        "quantized, otherwise --dtype; fp8 (e4m3) and int8 have one scale per token and head, hold nearly twice "
        "the tokens of bfloat16, and lose precision",
        ("auto", "float32", "bfloat16", "float16", *encodings),
    )
    cluster_kv_dtype: str = flag(
        "auto",
        "cache",
        "KV element type of the pool, unless --pool-dtype encodes it, the same on all nodes of a cluster; a node with "
        "another --kv-cache-dtype converts what it sends and reads, and puts nothing into the pool if its type is "
        "less precise; auto = that of the cluster to join, otherwise --kv-cache-dtype",
        ("auto", "float32", "bfloat16", "float16", *encodings),
    )
    kv_groups: str = flag(
        "windows",
        "cache",
        "windows = layers that see a window (Gemma, gpt-oss) have blocks of their own, which leave the arena and are "
        "not handed over once the window has passed them; uniform = a block has all layers; all nodes of a "
        "cluster use the same",
        ("windows", "uniform"),
    )
    pool_windows: str = flag(
        "all",
        "cache",
        "with --kv-groups windows: which blocks of windows the pool keeps; all = a prompt goes on from the pool after "
        "any common beginning; ends = those at the ends of prompts and behind them: less is stored, and a prompt goes "
        "on only where another one or its answer ended; all nodes of a cluster use the same",
        ("all", "ends"),
    )
    state_interval: int = flag(
        256,
        "cache",
        "with a model whose layers keep a state (Qwen3-Next, Kimi Linear): blocks between two saved states of a "
        "prompt, at which prompts with a common beginning can go on; 0 = states are saved only at the ends of prompts "
        "and answers",
        unit="blocks",
        least=0,
    )
    kv_cache_bytes: int = flag(
        -1,
        "cache",
        "size of the engine's KV arena; auto = on a CPU 1/8 of free memory, at most 2G; on a GPU as "
        "--gpu-memory-utilization says",
        least=1,
        auto=-1,
    )
    prefault: bool = flag(
        True,
        "cache",
        "touch all pages of the arenas while the node is idle, so that requests do not have to; leaves a quarter of "
        "the RAM free",
    )
    gpu_memory_utilization: float = flag(
        0.9, "cache", "share of GPU memory for weights and KV when --kv-cache-bytes is auto", least=0.01, most=1.0
    )
    enable_prefix_caching: bool = flag(True, "cache", "reuse KV of equal prefixes, from any tier")
    prefix_fetch: str = flag(
        "auto",
        "cache",
        "load prefixes from lower tiers and other nodes: auto = when a fetch is faster than computing them",
        ("auto", "always", "never"),
    )
    dram_bytes: int = flag(
        -1,
        "cache",
        "DRAM share of the pooled store; auto = 1G (at most 1/4 of free memory) with role store, --ssd-path or "
        "--beyond-memory on or --attention-elsewhere, otherwise 0",
        least=0,
        auto=-1,
    )
    beyond_memory: str = flag(
        "off",
        "cache",
        "requests whose KV exceeds the arena of a decode node: off = refuse them; on = this node keeps their older "
        "blocks in its share of the pool (up to three quarters of --dram-bytes and --ssd-bytes) and reads each layer "
        "of them in every step, one such request at a time; only on CPUs",
        ("off", "on"),
    )
    attention_elsewhere: str = flag(
        "off",
        "cache",
        "blocks of requests beyond memory on other nodes with this flag, which attend to them when asked: queries and "
        "parts of the output travel, KV stays; off = none, and this node holds none for others; auto = where that "
        "makes the answer faster, or the request fits at all, by measured times; always = as many as others lend; "
        "each lends up to three quarters of its --dram-bytes",
        ("off", "auto", "always"),
    )
    eviction: str = flag(
        "lru",
        "cache",
        "order in which the KV arena, DRAM and SSD evict unused blocks, or your own policy: FILE.py:NAME",
        tuple(policies),
        file=True,
    )
    cache_admission: str = flag(
        "always",
        "cache",
        "which new blocks may replace others in a full DRAM share, or your own policy: FILE.py:NAME; unless this is "
        "always, an engine also offers the blocks again that it reuses from its own arena",
        tuple(admissions),
        file=True,
    )
    cache_shares: str = flag(
        "none",
        "cache",
        "parts of the KV arena, DRAM and SSD tier that belong to a class, which lends what it does not use; values "
        "and objects that programs store have class objects: interactive=0.6,objects=0.1",
        unit="CLASS=SHARE,...",
    )
    pool_dtype: str = flag(
        "auto",
        "cache",
        "KV element type in the pooled store and in transfers to and from it; auto = the cluster's type, otherwise "
        "as in the KV arena; fp8 (e4m3) and int8 have one scale per head, move half the bytes of bfloat16, and lose "
        "precision; int4 has a smallest value and a step per group of up to 32 elements, moves about a third, and "
        "loses more; int4-auto = int4 for blocks whose home is behind so slow a link that a later get saves at least a "
        "quarter of its time, and as in the KV arena for the others",
        ("auto", *pool_types),
    )
    wire_dtype: str = flag(
        "auto",
        "cache",
        "KV element type in transfers from prefill to decode nodes; auto = the cluster's type, otherwise as in the KV "
        "arena; fp8 (e4m3) and int8 have one scale per head and block, move half the bytes of bfloat16, and lose as "
        "much precision as a quantized pool; all nodes of a cluster use the same type, and nodes whose blocks differ "
        "do not encode for each other",
        ("auto", *encodings),
    )
    kv_staging_bytes: int = flag(
        -1,
        "cache",
        "size of each buffer for encoded blocks with --pool-dtype or --wire-dtype: one for blocks to the pool, one for "
        "blocks from it, one for KV to decode nodes; a node does not load a prefix layer by layer if two of its layers "
        "take more than half a buffer; auto = 16M, or 4 blocks if they are larger",
        least=1,
        auto=-1,
    )
    block_checksums: bool = flag(
        True,
        "cache",
        "compute a checksum when a pooled block is put, and compare it at every get; off = compare only reads from SSD",
    )
    prefetch: str = flag(
        "wait",
        "cache",
        "how long a request waits for a prefix that is loading: wait = until it arrives; timeout = for "
        "--prefetch-timeout-ms; best-effort = while other requests keep the node busy",
        ("wait", "timeout", "best-effort"),
    )
    prefetch_timeout_ms: int = flag(200, "cache", "maximum wait with --prefetch timeout", least=1)
    ssd_path: str | None = flag(
        None, "cache", "directory of the SSD tier, a separate one for each node; none = no SSD tier"
    )
    ssd_bytes: int = flag(4 << 30, "cache", "size of the SSD tier on disk", least=1 << 20)
    ssd_backend: str = flag(
        "lmdb",
        "cache",
        "storage of the SSD tier: lmdb = an LMDB file; file = one preallocated file that bypasses the page cache",
        tuple(backends),
    )
    session_parking: bool = flag(
        True,
        "cache",
        "between two turns of a session (X-Session-Id) that this node accepts, the pool keeps its blocks by the "
        "predicted time of the next one: those wanted late leave DRAM first, those on SSD come up in time, and those "
        "of sessions that will not return are dropped; off = by their last use alone",
    )
    session_hold_ms: int = flag(
        15_000,
        "cache",
        "with --session-parking, blocks of a session stay where they are if it probably returns within this time",
        least=0,
    )
    session_window_ms: int = flag(
        30_000,
        "cache",
        "with --session-parking, how long blocks that came up for a predicted return wait in DRAM, at most; they come "
        "up if three of five such sessions return within some window of this length, and only into room that nothing "
        "else needs",
        least=1,
    )
    session_ttl_ms: int = flag(
        3_600_000,
        "cache",
        "with --session-parking, the longest time after which blocks of a session that does not return are dropped if "
        "the tier is nearly full; the time at which one of fifty such sessions would still return is usually earlier",
        least=1000,
    )
    value_bytes: int = flag(
        1 << 20, "cache", "size of the largest value, and of a slot of the store, with --model none", least=64
    )
    ssd_sync_ms: int = flag(
        1000,
        "cache",
        "interval between syncs of the SSD tier, which bounds what a power failure loses; 0 = sync at each write",
        least=0,
    )
    pin_share: float = flag(
        0.25,
        "cache",
        "part of this node's share (of its SSD tier if it has one, otherwise of its DRAM) that values stored with "
        "pin=True may use; 0 = none",
        least=0.0,
        most=0.9,
    )
    tenants: str = flag(
        "none",
        "cache",
        "tenants (tenant_id of mooncake.store) whose values in this node's share are counted, and with BYTES limited: "
        "the node refuses further puts of that tenant; all others share the rest; give every node with a share the "
        "same value: team-a=4G,team-b",
        unit="TENANT[=BYTES],...",
    )
    kv_events_config: str | None = flag(
        None,
        "cache",
        "publish which blocks this node's arena holds, for indexers of others, in the form and with the JSON of vLLM: "
        '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}; none = off',
        unit="json",
    )
    replicas: int = flag(1, "cache", "homes of every pooled block; hot blocks have more", unit="copies", least=1)
    store_timeout_ms: int = flag(
        3000,
        "cache",
        "maximum wait for an answer from the home of pooled blocks; after that the node asks another replica, or "
        "counts a miss",
        least=100,
    )
    repair_limit_bytes: int = flag(
        256 << 20,
        "cache",
        "maximum bytes per second that this node moves to their right homes after joins and losses; 0 = no limit",
        least=0,
    )
    leave_ms: int = flag(
        2000, "cache", "maximum time in which a stopping node hands its pooled blocks to other nodes", least=0
    )
