"""Requests whose KV exceeds the arena: their older blocks lie in this node's share of the pool.

Files:
    host      Says whether this node can take a request whose KV exceeds its arena, and finds the request's room
    lodged    The room in the tiers of one request beyond memory, and its blocks on their way there and back
    messages  Messages between acceptors and nodes that take requests beyond memory: their kinds and bodies
    window    Reads cold blocks into the window, layer by layer, ahead of the layers that need them
"""
