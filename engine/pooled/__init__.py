"""Blocks of the engine's arena on their way to the pooled store and back: plain, encoded, or through host memory.

Files:
    conversion      A thread that encodes and decodes KV blocks while the event loop goes on
    device_blocks   Pooled blocks of an arena in GPU memory: the store moves and checks bytes the CPU can read
    encoded_blocks  Blocks in one byte per element in the pool and on the way to and from it (--pool-dtype)
    pool_blocks     How blocks of the engine's KV arena go to the pooled store and come back: as they are here
    prefetch        How long a request waits for a prefix that is on its way from lower tiers and other nodes
"""
