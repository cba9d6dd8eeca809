"""Who is in the cluster: SWIM with Lifeguard. Pure.

Files:
    detector   Failure detection: probes, helpers, suspicions and the node's own health, as messages through an outbox
    events     Events that gossip cores receive and effects that they return: the complete interface to a driver
    health     Local health (Lifeguard, Dadgar, Phillips and Currey, 2018): a slow node suspects others less
    joining    Joining the cluster: ask until all pages of the member list have arrived; decide which nodes may join
    member     A member of the cluster as gossip describes it, and the timing presets of the protocol
    outbox     Collects the messages of a membership core, signs them with its node and adds rumours
    packet     Datagrams of the gossip planes: a 12-byte header that rejects foreign and damaged packets, then the
               body
    probe      Chooses the next node to probe and tracks running probes: SWIM's failure detector without its messages
    quiet      Which nodes an observer asks for a sign of life, and which of them it has reason to suspect
    roster     The members of the cluster: the merge rule for statements about nodes, and the rumours still to spread
    serial     Serial numbers (RFC 1982): counters that wrap around, so that there is always a newer one
    steady     A clock that never goes back, made from one that may
    suspicion  Running suspicions: long at first, shorter with every node that confirms independently
    swim       SWIM membership with Lifeguard: the members of the cluster, without a central node and without reading
               a clock
"""
