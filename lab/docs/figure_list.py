"""Every table of measured figures of docs/performance.md."""

from __future__ import annotations

from lab.docs.figures import Figure

ENGINE = (
    "scripts/bench.py engine --rounds 1 --peers llama,vllm --llama-server LLAMA/llama-server "
    "--peer-python vllm=VENV/bin/python"
)
CONNECT = "scripts/bench.py connect --peer-python VENV/bin/python"
CONNECT_VLLM = (
    "scripts/bench.py connect-vllm --peer-python vllm=VENV/bin/python --peer-python upstream=OTHER/bin/python "
    "--only alone,upstream-store,our-store,own-connector"
)
PAUSES = {
    "longest pause p99": "longest pause, p99, s",
    "longest wait for a first token": "longest wait for a first token, s",
    "longest pause p99 -> goal": "goal of both, s",
}
JUDGED = {
    "errors": "errors",
    "wrong tokens": "wrong tokens",
    "blocks held afterwards": "blocks held afterwards",
    "memory growth": "memory growth, MiB",
}
KILLED = {"streams cut": "streams cut", "reconnects": "reconnects"} | PAUSES | JUDGED
NO_STREAM = "none"
"""The cell of a pause or wait where no stream was cut, or where all streams had their first token already."""

FIGURES = (
    Figure(
        "engine",
        {name: name for name in ("TPOT", "TTFT", "TTFT p99", "TPOT p99", "TTFT second")},
        command=ENGINE,
        compared_with=("llama", "vllm", "floor"),
    ),
    Figure(
        "engine-shares",
        {
            "bytes per token": "MB per token, at most",
            "bytes per token -> floor": "floor",
            "share of memory": "of the memory's rate",
            "share of products": "of the products' peak",
            "threads": "threads",
        },
        result="engine",
        command=ENGINE,
        cases="ours, .*",
    ),
    Figure(
        "interference",
        {
            "TBT before, median": "gap before, median, ms",
            "TBT p99": "gap, p99, ms",
            "TBT max": "gap, longest, ms",
            "TTFT of the prompt": "TTFT of the prompt, ms",
            "stream tokens": "tokens/s of the streams",
        },
    ),
    Figure("stalls", {"wait p50": "p50, ms", "wait p99": "p99, ms", "over 2 ms": "waits over 2 ms, %"}, cases=r".*-0"),
    Figure("requests", {"longest /health": "longest wait"}, compared_with=("goal",)),
    Figure(
        "burst",
        {
            "served": "served",
            "served least": "served, least",
            "refusal p50": "refusal p50, ms",
            "refusal p99": "refusal p99, ms",
            "refusal p99 -> goal": "goal, ms",
            "TTFT p99": "first token p99, ms",
            "end p99": "end p99, ms",
        },
        without="none",
    ),
    Figure(
        "estimates",
        {
            "ttft_s MAPE": "first token, %",
            "wait_s MAPE": "wait, %",
            "prefill_s MAPE": "prefill, %",
            "step_s MAPE": "token, %",
            "ttft_s MAPE -> goal": "goal, %",
        },
    ),
    Figure(
        "start", {"ready": "ready, s", "first token": "first token, s", "TPOT of one stream": "TPOT of one stream, ms"}
    ),
    Figure("speculative", {"ms per token": "time per token"}, compared_with=("none",)),
    Figure(
        "attention",
        {"time": "time"},
        result="attention-cpu",
        command="scripts/bench.py attention --device cpu",
        compared_with=("torch",),
    ),
    Figure(
        "attention-shares",
        {
            "share of GEMM": "of the products' rate",
            "share of read": "of reading in order",
            "share of blocks": "of reading the blocks",
        },
        result="attention-cpu",
        command="scripts/bench.py attention --device cpu",
    ),
    Figure(
        "latent",
        {"step": "", "arena, wire and pool": ""},
        compared_with=("latent, absorbed", "K and V of 16 heads", "K and V of 4 heads"),
    ),
    Figure(
        "pool-hits",
        {name: name for name in ("loaded", "TTFT of the hit", "TTFT, computed")},
        compared_with=("K and V of 16 heads",),
    ),
    Figure(
        "windows",
        {"moved": "moved", "transfer": "transfer", "TTFT": "first token"},
        compared_with=("uniform", "needed"),
    ),
    Figure(
        "delta",
        {"time": "time", "rate": "rate"},
        cases=r".*(8 decodes|chunk of 512), (avx512_bf16|avx2), 2 threads",
        compared_with=("torch", "update", "GEMM"),
    ),
    Figure(
        "transfer-shm",
        {"GB/s": "", "p50": "p50"},
        result="transfer",
        cases=r".*, shared memory",
        compared_with=("memcpy", "memcpy-2", "nixl"),
    ),
    Figure(
        "transfer-tcp",
        {"GB/s": "", "p50": "p50"},
        result="transfer",
        cases=r".*, TCP",
        compared_with=("sockets", "mooncake-te"),
    ),
    Figure(
        "transfer-tcp-key",
        {"GB/s": "", "p50": "p50"},
        result="transfer",
        cases=r".*, TCP with a cluster key",
        compared_with=("ours-tcp",),
    ),
    Figure(
        "store-shm",
        {"GB/s": "", "p50": "p50"},
        result="store",
        cases=r".*, shared memory",
        compared_with=("memcpy", "memcpy-2", "mooncake-store"),
    ),
    Figure(
        "store-tcp",
        {"GB/s": "", "p50": "p50"},
        result="store",
        cases=r".*, TCP",
        compared_with=("sockets", "mooncake-store"),
    ),
    Figure(
        "connect-shm",
        {"p50": "p50", "p99": "p99"},
        result="connect",
        command=CONNECT,
        cases=r"(put|get) .*, shm",
        compared_with=("upstream",),
    ),
    Figure(
        "connect-tcp",
        {"p50": "p50", "p99": "p99"},
        result="connect",
        command=CONNECT,
        cases=r"(put|get) .*, tcp",
        compared_with=("upstream",),
    ),
    Figure(
        "connect-engine-tcp",
        {"p50": "p50", "p99": "p99"},
        result="connect",
        command=CONNECT,
        cases=r"(write|read) .*, tcp",
        compared_with=("upstream",),
    ),
    Figure(
        "connect-engine-one-host",
        {"p50": "p50", "p99": "p99"},
        result="connect",
        command=CONNECT,
        cases=r"(write|read) .*, one host",
        compared_with=("memcpy", "upstream"),
    ),
    Figure(
        "connect-vllm",
        {
            "TTFT new prefix": "first token, new prefix",
            "TTFT prefix of another process": "first token, prefix of another process",
            "TTFT after a restart": "first token, after a restart",
            "turns per second": "turns",
            "mean TTFT of a turn": "first token of a turn, mean",
        },
        command=CONNECT_VLLM,
        cases=r".*, (our-store|own-connector)",
        compared_with=("alone", "upstream-store"),
    ),
    Figure(
        "cpp",
        {
            "TTFT, long prompt alone": "first token, long prompt alone",
            "TTFT, long prompt with short ones": "first token, long prompt with short ones",
            "TTFT of short prompts, median": "first token, short prompts, median",
            "short prompts": "short prompts",
        },
        command="scripts/bench.py cpp --rounds 2",
        cases=".* of two",
        compared_with=("one node",),
    ),
    Figure(
        "beyond-memory",
        {"decode, one stream": "decode, one stream", "TTFT": "first token", "time per token": "time per token"},
        compared_with=("arena that holds it", "its forecast", "reading alone", "reading the weights too"),
    ),
    Figure(
        "offload",
        {
            "decode, 1 at once": "decode, 1 at once",
            "decode, 8 at once": "8 at once",
            "decode, 32 at once": "32 at once",
        },
        command="scripts/bench.py offload --weight-dtype int8",
        compared_with=("resident", "limit"),
    ),
    Figure("experts", {"rate": ""}, compared_with=("gloo", "memcpy")),
    Figure(
        "collectives",
        {"all_reduce": "all_reduce", "all_to_all": "all_to_all"},
        cases=r"ranks=\d bytes=(4096|65536|1048576|16777216|67108864)",
        compared_with=("gloo", "memcpy"),
    ),
    Figure(
        "batches",
        {
            "output tokens": "output",
            "TTFT p50": "first token, median",
            "TTFT p99": "first token, p99",
            "TBT p50": "gap between tokens, median",
            "TBT p99": "gap between tokens, p99",
        },
        cases=r"batch|.* and batch",
        compared_with=("online", "alone"),
    ),
    Figure(
        "overlap",
        {
            "transfer": "transfer, ms",
            "hidden": "hidden, ms",
            "overlap efficiency": "hidden / transfer",
            "TTFT": "TTFT, ms",
            "first to second token": "first to second token, ms",
        },
        result="overlap-limited",
        command="scripts/ablate.py overlap --live",
    ),
    Figure(
        "quantization",
        {
            "perplexity change": "perplexity, change in %",
            "top-1 agreement": "same first choice, %",
            "greedy answers that never differ": "greedy answers that never differ, %",
            "bytes per block": "bytes per block",
        },
    ),
    Figure(
        "codec",
        {
            "bytes after / before": "bytes after / before",
            "encode": "encode",
            "decode": "decode",
            "KV over 1 Gbit/s, overlapped": "KV over 1 Gbit/s",
            "KV over a paced link of 1 Gbit/s": "KV over 1 Gbit/s, measured",
        },
        cases="KV in .*",
        compared_with=("zlib 1", "memcpy", "line rate"),
    ),
    Figure("kill-roles", KILLED, command="scripts/faults.py kill-roles", without=NO_STREAM),
    Figure(
        "kill-roles-single",
        KILLED,
        command="scripts/faults.py kill-roles --shape single --model embedded",
        without=NO_STREAM,
    ),
    Figure(
        "stop-nodes",
        {"requests": "requests", "refused while it stood still": "refused and sent again"} | JUDGED,
        command="scripts/faults.py stop-nodes",
        timed=False,
    ),
    Figure(
        "exhaustion",
        {"requests": "requests"}
        | JUDGED
        | {"silent connections": "silent connections", "disk troubles reported": "disk troubles reported"},
        command="scripts/faults.py exhaustion",
        timed=False,
    ),
    Figure(
        "put-histories",
        {
            "keys put by all clients": "keys put by all clients",
            "histories not linearizable": "histories that are not linearizable",
            "keys put": "keys put",
            "keys first put on both sides": "keys first put on both sides",
            "keys read differently at last": "keys read differently at last",
        },
        command="scripts/faults.py put-histories",
        timed=False,
    ),
    Figure(
        "cut-nodes",
        {"requests": "requests"} | PAUSES | {"heal to one cluster": "one cluster again after, s"} | JUDGED,
        command="scripts/faults.py cut-nodes",
        without=NO_STREAM,
    ),
    Figure(
        "cut-sites",
        {
            "first token p50": "first token, median, s",
            "first token p99": "first token, p99, s",
            "east to west": "east to west, MB",
            "west to east": "west to east, MB",
            "KV over the link": "of it KV within its budget, MB",
            "most KV in one window": "most of it in one window, of the budget",
            "requests": "requests",
        }
        | PAUSES
        | {"heal to one cluster": "one cluster again after, s", "errors": "errors", "wrong tokens": "wrong tokens"},
        command="scripts/faults.py cut-sites",
        without=NO_STREAM,
    ),
    Figure(
        "rolling-restart",
        {"requests that ended well": "ended well", "requests that failed": "failed", "nodes": "nodes restarted"},
        command="scripts/faults.py rolling-restart --nodes prefill=2,decode=2,store=2 --tiny --requests 600",
        timed=False,
    ),
    Figure(
        "churn",
        {
            "requests": "requests",
            "errors": "errors",
            "wrong tokens": "wrong tokens",
            "ended by SIGKILL": "killed",
            "ended by SIGTERM": "terminated",
            "ended by drain": "drained",
            "segments of dead nodes": "segments of dead nodes",
            "connections to dead nodes": "connections to them",
            "growth of private memory": "growth of memory, MiB",
            "growth of open files": "of open files",
            "growth of threads": "of threads",
        },
        command="scripts/faults.py churn --seconds 480.0 --most-mib 12.0",
        timed=False,
    ),
    Figure(
        "migrations",
        {
            "moved requests": "moved requests",
            "errors": "errors",
            "wrong tokens": "wrong tokens",
            "pause p50": "pause, p50, s",
            "pause p99": "pause, p99, s",
            "longest pause p99": "longest pause after a kill, p99, s",
        },
        command="scripts/faults.py migrations",
    ),
    Figure(
        "ranks",
        {
            "requests": "requests",
            "errors": "errors",
            "wrong tokens": "wrong tokens",
            "longest pause p99": "longest pause, p99, s",
        },
        command="scripts/faults.py ranks",
    ),
    Figure(
        "role-changes",
        {"requests": "requests", "first token p50": "first token, p50, s", "role changes": "role changes"} | JUDGED,
        command="scripts/faults.py role-changes",
    ),
    Figure(
        "sched",
        {"whole p50": "whole, p50", "whole p99": "whole, p99"},
        cases="decision, .*",
        compared_with=("mooncake-central-greedy", "dynamo-cost", "goal"),
    ),
    Figure(
        "sched-parts",
        {"match p50": "match, us", "shortlist p50": "shortlist, us", "choose p50": "choose, us"},
        result="sched",
        cases="decision, .*",
    ),
    Figure(
        "sched-accept",
        {"requests": "accepted requests", "chain p50": "keys, p50"},
        result="sched",
        cases="accept, .*|keys of 12,000 tokens",
        compared_with=("goal",),
    ),
    Figure(
        "backends",
        {
            "hit_rate": "hit rate",
            "median_ttft": "TTFT, median",
            "p99_ttft": "TTFT, p99",
            "mean_tpot": "TPOT, mean",
            "failed": "failed",
        },
        command="scripts/bench.py backends --vllm VENV/bin/python",
        compared_with=("round-robin", "random"),
    ),
    Figure(
        "overload",
        {
            "goodput": "good requests/s",
            "refused": "refused, share",
            "late to the first token": "late to the first token, share",
            "prefill wasted on refused": "prefill spent on refused, share",
            "prefill spent on late": "prefill spent on late, share",
        },
        result="overload-live",
        command="scripts/ablate.py overload --live",
    ),
    Figure(
        "gossip",
        {
            "sent per node, mean": "MB/s per node, mean",
            "sent per node, most": "MB/s, most",
            "age of information p50": "age p50, s",
            "age of information p99": "age p99, s",
        },
        command="scripts/bench.py gossip --only state",
        timed=False,
    ),
    Figure(
        "gossip-detection",
        {
            "first suspicion p50": "first suspicion p50, s",
            "dead for everybody p50": "dead for everybody p50, s",
            "dead for everybody, most": "most, s",
        },
        command="scripts/bench.py gossip --only detection",
        timed=False,
    ),
    Figure(
        "gossip-deaths",
        {name: name for name in ("node-hours", "pauses", "suspicions refuted", "false deaths")},
        command="scripts/bench.py gossip --only false-deaths --node-hours 1000",
        timed=False,
    ),
    Figure(
        "kv-bytes",
        {"arena and transfer": "arena and transfer", "pool": "pool"},
        command="scripts/plan.py kv-bytes",
        cases=r"(?!SmolLM2|Llama-3-8B).* (8,192|131,072) tokens, all",
        compared_with=("uniform",),
        timed=False,
    ),
    Figure(
        "ops",
        {"step": "step"},
        result="ops-steps-2-threads",
        command="scripts/bench.py ops --only steps --threads 2",
        compared_with=("TorchOps", "bfloat16"),
    ),
)
