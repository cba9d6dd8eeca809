"""Sessions that an acceptor answers.

Files:
    turns  Sessions: what the KV of a conversation or an agent does between two turns that this acceptor answers
"""
