"""Ablations of long prompts on groups of prefill nodes.

Files:
    case          A case: one way to compute long prompts on some nodes, together with short prompts
    long_prompts  A pipeline over nodes, divided tokens, or one node: by the length of a prompt and the number of
                  nodes
"""
