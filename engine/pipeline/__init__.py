"""Chunked pipeline prefill: several nodes compute one long prompt, each some of the layers.

Files:
    arrival   How much of a prompt's KV the stages of a pipeline have delivered to the decode node
    messages  Messages between the stages of a pipeline, and from them to the decode node: their kinds and bodies
    stages    The stages that this node computes: they agree on the known prefix, and pass hidden states on
"""
