"""The shell of gossip: one UDP socket, and load words read over the transfer engine.

Files:
    driver          The asyncio shell of sched.gossip.core.GossipCore: one UDP socket, one timer, callbacks
    load_words      Load words of other nodes, read and claimed
    packet_guard    The edge of the gossip socket: what leaves is sealed, what arrives is opened or dropped
    sealed_packets  Sealed datagrams: gossip encrypted and authenticated with the cluster key
"""
