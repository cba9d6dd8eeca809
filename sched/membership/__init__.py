"""Who is in the cluster: SWIM with Lifeguard. Pure.

Files:
    detector   Failure detection: probes, helpers, suspicions and the node's own health
    events     Events that gossip cores receive and effects that they return
    health     Local health (Lifeguard, Dadgar, Phillips and Currey, 2018)
    joining    Joining the cluster: ask until all pages of the member list have arrived
    member     A member of the cluster as gossip describes it, and the timing presets of the protocol
    outbox     Collects the messages of a membership core, signs them with its node and adds rumours
    packet     Datagrams of the gossip planes: a 12-byte header that rejects foreign and damaged packets
    probe      Chooses the next node to probe and tracks running probes
    roster     The members of the cluster: the merge rule for statements about nodes
    serial     Serial numbers (RFC 1982): counters that wrap around, so that there is always a newer one
    steady     A clock that never goes back, made from one that may
    suspicion  Running suspicions: long at first, shorter with every node that confirms independently
    swim       SWIM membership with Lifeguard: the members of the cluster
"""
