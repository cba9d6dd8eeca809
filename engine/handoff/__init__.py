"""KV between nodes: prompts pushed or pulled, prefixes loaded, blocks published; what an engine node answers.

Files:
    arenas          Whose arena has more of a prompt than this node's: what the digests of all nodes tell
    borrowing       A part of a prompt out of another node's KV arena: the reader's side of lending.py
    incoming        The decode node's side of a prompt that another node computes: blocks for it
    items           What an engine node has to tell an acceptor of one request, as updates
    lending         Blocks of this node's arena that another node reads as the prefix of a prompt
    messages        What acceptor and engine nodes say to each other about requests
    orphans         Requests whose acceptor was lost while they decoded: kept for LEASE_S
    own_load        How busy this node is: what it answers to a probe
    prefix_sources  Where the next part of a prompt's prefix can be had
    pull            The prefill node says what is ready
    push            The prefill node writes a prompt's KV into the slots that the decode node has reserved
    rail_news       What this node's rails give, as acceptors and the loader of prefixes want to know it that weigh
                    moving KV against computing it
    reuse           Reuse of KV beyond this node's engine arena: prefixes are loaded from the pooled store
    service         What other nodes may ask of an engine node: probe, reserve, prefill, pull, handover, abort
    updates         What an engine node tells the acceptor of one attempt of a request, and its form on the wire
    wire            KV in one byte per element on the way from a prefill node to a decode node
"""
