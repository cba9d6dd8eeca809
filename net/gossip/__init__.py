"""The shell of gossip: one UDP socket, and load words read over the transfer engine.

Files:
    driver          The asyncio shell of sched.gossip.core.GossipCore: one UDP socket, one timer, callbacks
    load_words      Reads and claims load words of other nodes; sched/gossip/load_word.py defines their layout and
                    meaning
    packet_guard    The edge of the gossip socket: seals outgoing packets, opens or drops incoming ones, with or
                    without a key
    sealed_packets  Sealed datagrams: gossip encrypted and authenticated with the cluster key; each one is accepted
                    once
"""
