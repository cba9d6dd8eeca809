"""Who is in the cluster: SWIM with Lifeguard. Pure.

Files:
    detector   Failure detection: probes, helpers, suspicions and the node's own health
    events     What happens to the gossip cores, and what they want done
    health     Local health (Lifeguard, Dadgar, Phillips and Currey, 2018)
    joining    Entering the cluster: asking until the member list has come in all its pages; who may enter
    member     A member of the cluster as gossip tells it, and the timing presets of the protocol
    outbox     What a membership core wants sent: messages signed by its node, filled up with rumours
    packet     Datagrams of the two gossip planes: a 12-byte header that rejects strangers and damage
    probe      Whom to probe next, and what became of the probes under way
    roster     Who is in the cluster: the merge rule of statements about nodes
    serial     Serial numbers (RFC 1982): counters that wrap around, so that there is always a newer one
    steady     A clock that only goes forward, whatever the one it is read from does
    suspicion  Suspicions under way: long at first, shorter with every node that confirms one independently
    swim       SWIM membership with Lifeguard: who is in the cluster
"""
