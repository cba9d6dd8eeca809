"""Fuzzing of all decoders of foreign data: mutate.py changes bytes, targets.py lists the decoders.

Files:
    answers   Judges every answer of an API under fuzzing
    api       Fuzzes the API of a small cluster from its own OpenAPI document, with schemathesis, and judges every
              answer
    claims    Messages in which nodes claim blocks that they compute (sched/gossip/intents.py) and work in flight
    coded     Coded frames (net/codec/): the C decoder against the definition, over the same bytes
    decoders  Fuzzes every decoder of foreign bytes: wire frames, gossip, HTTP bodies, GGUF and trace files, and more
    forge     Gossip packets of a stranger who knows the protocol and the names of the nodes
    gossip    Two gossip cores exchange packets, which are the corpus; one of them gets fuzzed packets
    leases    The leases of a share to two peers (cache/server/leases.py) after arbitrary messages, while time passes
    messages  Messages between nodes about requests and pooled blocks, as a handler gets them from the control
              connection
    mutate    Seeded mutations of valid inputs: bits, numbers at their limits, pieces cut, doubled or spliced
    promises  Whether an OpenAPI document allows a body, and whether a server may still refuse it
    targets   The decoders: their inputs, the errors that they may raise, and a few valid inputs to start from
"""
