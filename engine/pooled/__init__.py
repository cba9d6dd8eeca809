"""Blocks of the engine's arena on their way to the pooled store and back: plain, encoded, or through host memory.

Files:
    chosen_blocks   Pooled blocks of which each is exact, or in four bits where that pays
    conversion      A thread that encodes and decodes KV blocks while the event loop goes on
    device_blocks   Moves pooled blocks between the store and an arena in GPU memory
    encoded_blocks  Pooled blocks in a smaller type (--pool-dtype): encoded when they leave the arena, decoded when
                    they return
    pool_blocks     Blocks of the engine's KV arena on their way to and from the pooled store, unchanged
    prefetch        How long a request waits for a prefix that is on its way from lower tiers and other nodes
    rounding        Which blocks of the pool are rounded to four bits (--pool-dtype int4-auto): those whose home is
                    behind a slow link
    unlike_blocks   Pooled blocks of a node whose own blocks differ: converted when they leave the arena, and when
                    they return
"""
