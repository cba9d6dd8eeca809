"""Sessions: when the next turn of a conversation comes, and what happens to its KV until then.

Files:
    gaps     Learns the gaps between the turns of sessions, and predicts the next one
    parking  The way of a session's KV between two turns: it stays, moves down, comes back, is dropped
"""
