"""KV of sessions between their turns, at the home of the blocks.

Files:
    parked     ParkedBlocks: what happens to the blocks of sessions at their home, and when
    residence  How long a block that nobody reads stays in a full memory: blocks / evictions per second
"""
