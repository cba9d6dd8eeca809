"""Requests whose KV exceeds the arena: their older blocks lie in this node's share of the pool, or on other nodes.

Files:
    elsewhere  Blocks of requests beyond memory on other nodes, which attend to them when asked
    held       The blocks of one request on other nodes, and what is asked about them
    holder     Lends room in this node's DRAM share to requests of other nodes, and attends to their blocks when asked
    host       Says whether this node can take a request whose KV exceeds its arena, and finds the request's room
    leases     Which nodes have lent room for blocks here, and until when
    lodged     The room in the tiers of one request beyond memory, and its blocks on their way there and back
    messages   Messages of nodes that take requests beyond memory, and of nodes that hold their blocks: kinds and
               bodies
    window     Reads cold blocks into the window, layer by layer, ahead of the layers that need them
"""
