"""The computation of one node: requests, batching, the model, and the loops of the roles.

Files:
    backends/       Workers of others behind our acceptor (--backend): vLLM's servers, or nodes of ours
    beyond/         Requests whose KV exceeds the arena: their older blocks lie in this node's share of the pool, or
                    on other nodes
    calibration/    Measured steps: what steps of this node take, when it starts and again while it is idle
    checkpoint/     Loads a named model into memory: Hugging Face directories, GGUF, a cache of converted weights
    config/         One frozen Config: its fields, its flags, and the resolution of auto
    core/           Which requests compute how many tokens in the next step, and the loop that computes them
    doctor/         `python mooncake.py doctor`: what this machine offers to a node, and what would improve it
    experts/        Mixtures of experts over several processes of a node: each rank has a share of the experts
    front/          The acceptor's side of a request: placed, followed, tried again
    handoff/        KV between nodes: prompts pushed or pulled, prefixes loaded, blocks published; what an engine node
                    answers
    loading/        Builds a runner over an empty KV arena from a model source
    migration/      Running requests move between decode nodes: their blocks are copied while they decode
    model/          The decoder: its shape from any configuration file, its operations on CPU and GPU, its parts on
                    several ranks
    node/           One node, assembled: how it starts, reports and leaves
    observe/        Reports on requests and nodes: timelines, explain, top, OpenTelemetry
    offload/        Weights that exceed memory: some layers stay, the others are read from disk in every pass, ahead
                    of their use
    pooled/         Blocks of the engine's arena on their way to the pooled store and back: plain, encoded, or through
                    host memory
    prefill_group/  Prefill groups: several nodes compute one long prompt, as a pipeline over its layers or with its
                    tokens divided
    sampling/       From logits to tokens: penalties, draws, and randomness that does not depend on the node of a
                    request
    scaling/        Nodes for the load: roles that change, nodes and ranks with experts that start and leave
    sites/          Sites: which site computes a request, and prefixes that come from the pools of other sites
    speculation/    Speculative decoding: how drafts are proposed and verified
    start/          From the flags to a serving node: what is imported when, and the life of the process
    step/           One step: requests, blocks, rows and tensors
    text/           Converts between text and token ids: tokenizers, chat templates, and output cut at stop strings
    unlike/         KV between a node and others whose blocks differ: in tokens, in element type, or in both
    update/         New weights for a running cluster: every node prepares them next to the old ones, then all switch
"""

__version__ = "0.1.0"
