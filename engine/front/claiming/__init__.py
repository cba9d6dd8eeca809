"""Announcements of the acceptor before a prompt arrives at its node: its work, and the blocks that it will compute.

Files:
    bursts  Finds out whether another node already computes a prompt's new blocks, through the claims of
            sched/gossip/intents.py
    claims  Announces a prompt's work to its prefill node before the prompt arrives there
"""
