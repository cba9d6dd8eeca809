"""Fuzzing of everything that decodes what others wrote: mutate.py changes bytes, targets.py are the decoders.

Files:
    answers   Every answer of an API under fuzz, judged: server errors, errors of another form
    api       Fuzz the API of a small cluster from its own OpenAPI document, with schemathesis
    claims    What nodes claim of each other by messages: blocks that they have computed
    decoders  Fuzz every decoder of bytes that others wrote: wire frames, gossip, HTTP bodies
    forge     Gossip packets of a stranger who knows the protocol and the names of the nodes
    gossip    Two gossip cores that talk; what they said is the corpus
    leases    What a share has lent to two peers (cache/server/leases.py), after any messages of theirs
    messages  What nodes tell each other about requests and pooled blocks
    mutate    Changed copies of valid inputs, by seed: bits, numbers at their limits, pieces cut, doubled
    promises  Whether an OpenAPI document allows a body
    targets   The decoders: what they read, which errors they may raise
"""
