"""What one node computes: requests, batching, the model, and the loops of the roles.

Files:
    checkpoint/   From the model a user named to weights in memory: Hugging Face directories, GGUF
    config/       One frozen Config: its fields, its flags, and what auto becomes
    core/         Which requests compute how many tokens in the next step, and the loop that computes them
    doctor/       `python mooncake.py doctor`: what this machine offers a node, and what would make it better
    front/        The acceptor's side of a request: placed, followed, tried again
    handoff/      KV between nodes: prompts pushed or pulled, prefixes loaded, blocks published
    loading/      From a model source to a runner over an empty KV arena
    model/        The decoder: its shape from any configuration file, its operations on CPU and GPU
    node/         One node, wired; how it starts, reports and leaves
    observe/      What is told of requests and nodes: timelines, explain, top, OpenTelemetry
    pooled/       Blocks of the engine's arena on their way to the pooled store and back: plain, encoded
    sampling/     From logits to tokens: penalties, draws
    speculation/  Speculative decoding: who guesses, and which guesses hold
    step/         One step: requests, blocks, rows and tensors
    text/         Between text and token ids: tokenizers, chat templates, and output cut at stop strings
"""

__version__ = "0.1.0"
