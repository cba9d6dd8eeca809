"""Sessions: when the next turn of a conversation comes, and what happens to its KV until then.

Files:
    gaps     Learns the gaps between the turns of sessions, and predicts the next one
    parking  What happens to the KV of a session between two turns: it stays, moves down, comes back, is dropped
"""
