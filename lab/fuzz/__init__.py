"""Fuzzing of all decoders of foreign data: mutate.py changes bytes, targets.py lists the decoders.

Files:
    answers   Judges every answer of an API under fuzzing: server errors, errors in another format
    api       Fuzzes the API of a small cluster from its own OpenAPI document, with schemathesis
    claims    Messages in which nodes claim blocks that they compute
    decoders  Fuzzes every decoder of foreign bytes: wire frames, gossip, HTTP bodies
    forge     Gossip packets of a stranger who knows the protocol and the names of the nodes
    gossip    Two gossip cores exchange packets, which are the corpus; one of them gets fuzzed packets
    leases    The leases of a share to two peers (cache/server/leases.py) after arbitrary messages
    messages  What nodes tell each other about requests and pooled blocks
    mutate    Seeded mutations of valid inputs: bits, numbers at their limits, pieces cut
    promises  Whether an OpenAPI document allows a body
    targets   The decoders: their inputs, the errors that they may raise
"""
