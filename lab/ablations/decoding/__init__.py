"""Ablations of decode nodes: short and long answers, contexts and models beyond memory, and requests that move.

Files:
    answers  Prefill and decode on separate nodes, or mixed in steps: by the length of answers, and against a formula
    beyond   Decode beyond memory: by the resident share and the tier's bandwidth
    case     Cases of decode beyond memory: one context on one node, and a block of batches on one GPU
    flexgen  FlexGen's published figures: a block of batches that shares each read of the weights, and one batch alone
    moves    Running requests that move between decode nodes, and none that do: bursty loads, by the number of decode
             nodes
"""
