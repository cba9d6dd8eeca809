"""Rivals that need a mechanism which nodes do not have, so that only the simulator has them.

Files:
    decode_choice  Baselines of NetKV: Algorithm 1 places the prompt, and nothing about the network is known for the
                   decode node
    dynaserve      Two nodes compute the prompt of a request, split at any block so that both are equally busy
    nexus          Intra-node disaggregation: a prefill half and a decode half share the compute of one node
    table          Placement policies of the simulator by name: those of nodes, and those that only the simulator has
"""
