"""The KV arena of a simulated node: what requests hold and what later prompts may find share one memory.

Files:
    accounts    The room of an arena: what each request holds, which named blocks it uses, and what is left for others
    block_pool  Named blocks in the BlockPool of production: one slot each, and anonymous slots for all other KV
    stand_in    Named blocks without slots: the same calls of the eviction policy as BlockPool, at less cost
"""
