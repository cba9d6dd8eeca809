"""The part of Config that says where KV is kept, in what form, and for how long."""

from __future__ import annotations

from dataclasses import dataclass

from cache.admission import admissions
from cache.policies import policies
from engine.config_field import flag
from engine.config_model import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig(ModelConfig):
    block_size: int = flag(
        16,
        "cache",
        "tokens per KV block: unit of allocation, hashing, transfer and storage; equal in a cluster",
        unit="tokens",
        least=1,
        most=4096,
    )
    kv_cache_dtype: str = flag(
        "auto",
        "cache",
        "KV element type in the arena, and so between nodes and in the pool; auto = that of a quantized cluster, else "
        "--dtype; fp8 (e4m3) and int8 have a scale per token and head, hold nearly twice the tokens of bfloat16, and "
        "lose precision",
        ("auto", "float32", "bfloat16", "float16", "fp8", "int8"),
    )
    kv_cache_bytes: int = flag(
        -1,
        "cache",
        "engine KV arena; auto = on a CPU 1/8 of free memory, 2G at most, else by --gpu-memory-utilization",
        least=1,
        auto=-1,
    )
    prefault: bool = flag(
        True,
        "cache",
        "while idle, give the arenas their pages before requests need them; a quarter of the RAM is left free",
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
        tuple(policies),
        file=True,
    )
    cache_admission: str = flag(
        "always",
        "cache",
        "which blocks a full DRAM share takes in exchange for others, or your own policy: FILE.py:NAME; what an engine "
        "uses in its own arena is offered again where this is not always",
        tuple(admissions),
        file=True,
    )
    cache_shares: str = flag(
        "none",
        "cache",
        "parts of the KV arena, of DRAM and of the SSD tier that belong to a class and are lent while it does not use "
        "them; values and objects that programs store are of class objects: interactive=0.6,objects=0.1",
        unit="CLASS=SHARE,...",
    )
    pool_dtype: str = flag(
        "auto",
        "cache",
        "KV element type in the pooled store and on the way to and from it: auto = the cluster's, else as in the KV "
        "arena; fp8 (e4m3) and int8 have a scale per head, move half of the bytes of bfloat16, and lose precision",
        ("auto", "fp8", "int8"),
    )
    wire_dtype: str = flag(
        "auto",
        "cache",
        "KV element type on the way from prefill to decode nodes: auto = the cluster's, else as in the KV arena; fp8 "
        "(e4m3) and int8 have a scale per head and block, move half of the bytes of bfloat16, and lose precision: what "
        "decodes a prompt attends to its KV as if it came from such a pool; equal in a cluster",
        ("auto", "fp8", "int8"),
    )
    kv_staging_bytes: int = flag(
        -1,
        "cache",
        "where --pool-dtype or --wire-dtype encode: memory that encoded blocks pass through, for each of what goes to "
        "the pool, comes from it, and goes to decode nodes; a prefix of which two layers take more than half of it is "
        "not loaded layer by layer; auto = 16M, or 4 blocks if they are larger",
        least=1,
        auto=-1,
    )
    block_checksums: bool = flag(
        True,
        "cache",
        "a checksum per pooled block, taken where it is put and compared at every get; without it only reads from SSD "
        "are compared",
    )
    prefetch: str = flag(
        "wait",
        "cache",
        "how long a request waits for a prefix that is being loaded: until it is here, until a time has passed, or "
        "while others keep the node busy",
        ("wait", "timeout", "best-effort"),
    )
    prefetch_timeout_ms: int = flag(200, "cache", "longest wait with --prefetch timeout", least=1)
    ssd_path: str | None = flag(None, "cache", "directory of the SSD tier, one per node; none = no SSD tier")
    ssd_bytes: int = flag(4 << 30, "cache", "size of the SSD tier on disk", least=1 << 20)
    ssd_backend: str = flag(
        "lmdb",
        "cache",
        "what the SSD tier is kept in: an LMDB file, or one preallocated file past the page cache",
        ("lmdb", "file"),
    )
    value_bytes: int = flag(1 << 20, "cache", "with --model none: the largest value, and a slot of the store", least=64)
    ssd_sync_ms: int = flag(
        1000,
        "cache",
        "the SSD tier is synced so often, which bounds what a power failure loses; 0 = at each write",
        least=0,
    )
    pin_share: float = flag(
        0.25,
        "cache",
        "part of this node's share (of its SSD tier where it has one, else of its DRAM) that values stored with "
        "pin=True may take; 0 = none",
        least=0.0,
        most=0.9,
    )
    replicas: int = flag(1, "cache", "homes of every pooled block; hot blocks have more", unit="copies", least=1)
    store_timeout_ms: int = flag(
        3000,
        "cache",
        "longest wait for the home of pooled blocks to answer; then they are asked of another replica, or a miss",
        least=100,
    )
    repair_limit_bytes: int = flag(
        256 << 20,
        "cache",
        "bytes per second that this node moves to where they belong after joins and losses; 0 = no limit",
        least=0,
    )
    leave_ms: int = flag(
        2000, "cache", "a node that stops hands its pooled blocks to the others for so long at most", least=0
    )
