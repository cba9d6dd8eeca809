"""Prefill groups: several nodes compute one long prompt, as a pipeline over its layers or with its tokens divided.

Files:
    arrival   How much of a prompt's KV the nodes of a group have delivered to the decode node
    context   Context parallelism: each node computes all layers of some tokens, and the others' KV comes layer by
              layer
    member    One request on one node of its group, and what all ways to divide a prompt use
    members   All requests that this node computes in groups: the nodes agree on the known prefix, then begin
    messages  Messages between the nodes of a group, and from them to the decode node: their kinds and bodies
    pipeline  Chunked pipeline parallelism: each node computes some of the layers, and hidden states go from one to
              the next
"""
