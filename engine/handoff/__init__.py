"""KV between nodes: prompts pushed or pulled, prefixes loaded, blocks published; what an engine node answers.

Files:
    arenas          Finds arenas that hold more of a prompt than this node's arena
    borrowing       A part of a prompt out of another node's KV arena: the reader's side of lending.py
    converting      KV of a prompt for a decode node whose blocks differ: converted here, layer by layer, while the
                    next layers compute
    incoming        The decode node's side of a prompt that another node computes: it reserves blocks, and releases or
                    uses them
    items           Builds the updates (engine/handoff/updates.py) that an engine node sends to an acceptor about one
                    request
    leading         The run of a prompt's blocks that the pool can give back, for a model in which some layers limit
                    its end
    lending         Blocks of this node's arena that another node reads as the prefix of a prompt, kept where they are
                    meanwhile
    messages        Messages between acceptors and engine nodes about requests: their kinds and bodies
    orphans         Keeps requests whose acceptor was lost while they decoded, for LEASE_S, so that their clients can
                    reconnect
    outgoing        Prompts computed here whose KV goes to a decode node: how it moves, who learns of its end, and how
                    it stops
    own_load        How busy this node is: answers probes, and redirects prompts whose acceptor decided on outdated
                    load
    prefix_sources  The sources of the next part of a prompt's prefix, and the time each saves against computing that
                    part
    pull            The prefill node announces which KV is ready, and the decode node reads it from the prefill node's
                    blocks
    push            The prefill node writes a prompt's KV into the slots that the decode node has reserved
    rail_news       Reports the bandwidth of this node's rails to acceptors and to the prefix loader
    reuse           Reuse of KV beyond this node's engine arena: loads prefixes from the pooled store and publishes
                    new blocks to it
    service         Answers other nodes' messages to an engine node: probe, reserve, prefill, pull, handover, abort,
                    fence, and borrow
    updates         Updates from an engine node to the acceptor about one attempt of a request, and their wire format
    wire            Encodes KV in one byte per element for the transfer from a prefill node to a decode node
"""
