"""Benchmarks: this project against a peer or a limit in the same run.

Files:
    backends       Placement over two vLLM workers: the same requests through our acceptor with each policy of
                   --policies
    batches        Offline prompts as one batch (/v1/batches), the same prompts online, and interactive requests next
                   to the batch
    beyond_memory  A context several times the arena of its node: decode tokens/s, next to the limit of the memory
                   that holds the rest
    burst          How many requests of a burst are served, and how fast the others are refused
    codec          KV in fewer bytes: the lossless coder of slow links (--wire-codec), and four bits in the pool
    delta          The gated delta rule on the CPU: our C++ kernels at each level of this CPU next to torch, over
                   states in a pool
    estimates      How far the estimates of placements are from the measured times, on real nodes under load
    gossip         Gossip at scale: the real cores on a virtual network
    host           Host time of a decode step: the engine's work without the model, on one thread
    interference   How long running streams stall while a long prompt arrives: batching policies on one node, and two
                   nodes
    latent         A latent instead of K and V: steps of a random model, and the bytes of its KV, next to the same
                   model with K and V
    offload        A model of which most layers are read from disk in every pass: decode tokens/s, next to all layers
                   in memory
    pipeline       One long prompt on two prefill nodes of one core each, next to one of them alone: as a pipeline,
                   and by tokens
    pool_hits      A prefix that comes back from the pool: its time with a latent, next to the same model with K and V
                   per head
    requests       How long the largest allowed API requests block the event loop of a serving node for others
    serve          Open-loop serving benchmark against any OpenAI server; metrics and flags as in `vllm bench serve`
    speculative    Decoding with and without speculation, in one run: tokens per step, acceptance, time per output
                   token
    stalls         How long events wait for the event loop of a serving node, and why
    start          The time from start to first token, and the cost of splitting one node into processes
    windows        Layers that see a window: the KV of a prompt that moves to the decode node, next to the same model
                   in uniform blocks
    attention/     The parts of scripts/bench.py attention
    collectives/   The parts of scripts/bench.py collectives
    common/        Shared by all benchmark scripts: results, workloads, an OpenAI client, latency definitions
    connect/       Measures our pool as other engines use it, next to upstream's wheel: the Python calls, and vLLM
                   with both
    engine/        The parts of scripts/bench.py engine
    experts/       The parts of scripts/bench.py experts
    ops/           The parts of scripts/bench.py ops
    quantization/  Measures the model after prefixes that went through the pool, or to another node, in another type
    sched/         The parts of scripts/bench.py sched, one question each, and scripts/bench.py simulator
    transfer/      Parts of scripts/bench.py transfer: contenders in pairs of processes over the same two arenas
    weights/       The parts of scripts/bench.py weights
"""

BENCHMARKS = {
    "attention": "lab.bench.attention.command",
    "backends": "lab.bench.backends",
    "batches": "lab.bench.batches",
    "beyond-memory": "lab.bench.beyond_memory",
    "burst": "lab.bench.burst",
    "codec": "lab.bench.codec",
    "collectives": "lab.bench.collectives.command",
    "experts": "lab.bench.experts.command",
    "connect": "lab.bench.connect.command",
    "connect-vllm": "lab.bench.connect.vllm_command",
    "cpp": "lab.bench.pipeline",
    "delta": "lab.bench.delta",
    "engine": "lab.bench.engine.command",
    "estimates": "lab.bench.estimates",
    "gossip": "lab.bench.gossip",
    "host": "lab.bench.host",
    "interference": "lab.bench.interference",
    "latent": "lab.bench.latent",
    "offload": "lab.bench.offload",
    "ops": "lab.bench.ops.command",
    "pool-hits": "lab.bench.pool_hits",
    "quantization": "lab.bench.quantization.command",
    "requests": "lab.bench.requests",
    "sched": "lab.bench.sched.command",
    "serve": "lab.bench.serve",
    "simulator": "lab.bench.sched.simulator",
    "speculative": "lab.bench.speculative",
    "stalls": "lab.bench.stalls",
    "start": "lab.bench.start",
    "store": "lab.bench.transfer.store_command",
    "transfer": "lab.bench.transfer.command",
    "tune-attention": "lab.bench.attention.tune",
    "weights": "lab.bench.weights.command",
    "windows": "lab.bench.windows",
}
"""Name on the command line (scripts/bench.py) -> module whose main() runs it."""
