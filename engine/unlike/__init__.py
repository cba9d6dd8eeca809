"""KV between a node and others whose blocks differ: in tokens, in element type, or in both. Pure functions and tensors.

Files:
    nodes   Nodes of one cluster whose blocks differ, as placement sees them: how many bytes a hand-over moves
    pooled  Blocks of the arena as blocks of the pool, and back
    rows    Copies tokens between blocks of two forms: exactly between equal types, else through float32
    spans   Where the tokens of a block lie in the blocks of another node: contiguous bytes, for transfers
"""
