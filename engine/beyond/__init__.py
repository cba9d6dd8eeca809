"""Requests whose KV exceeds the arena: their older blocks lie in the DRAM of this node's share of the pool.

Files:
    host      Says whether this node can take such a request, and finds its room
    lodged    Lodged: the room in the tier of one such request, and its blocks on their way there and back
    messages  Messages between acceptors and nodes that take such requests
    window    Reads cold blocks into the window, layer by layer, ahead of the layers that need them
"""
