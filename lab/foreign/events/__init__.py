"""vLLM's own classes read the KV events of our nodes.

Files:
    command  vLLM's own classes read the KV events of a node of ours, and find exactly the blocks that it holds
    reader   Reads a node's KV events with vLLM's own classes
"""
