"""The shell of gossip: one UDP socket, and load words read over the transfer engine.

Files:
    driver          The asyncio shell of sched.gossip.core.GossipCore: one UDP socket, one timer, callbacks
    load_words      Reads and claims load words of other nodes
    packet_guard    The edge of the gossip socket: seals outgoing packets, opens or drops incoming ones
    sealed_packets  Sealed datagrams: gossip encrypted and authenticated with the cluster key
"""
