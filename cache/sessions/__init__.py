"""KV of sessions between their turns, at the home of the blocks.

Files:
    parked  ParkedBlocks: what happens to the blocks of sessions at their home, and when
"""
