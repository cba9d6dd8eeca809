"""Running requests move between decode nodes: their blocks are copied while they decode.

Files:
    arriving  The destination of a move: reserves blocks for a request that runs elsewhere, and goes on with it after
              the commit
    migrator  Moves running requests to other decode nodes: when this node leaves, when the load is uneven, before
              blocks run out
    move      The move of one running request to another decode node, as the source sees it
    outgoing  The source of a move: carries out the effects of engine/migration/move.py
"""
