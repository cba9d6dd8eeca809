"""Mixture of experts: the experts of a layer, and which of them a token passes through.

Files:
    losses          Tokens of a step whose experts were lost, and what becomes of their requests
    moe             Mixture of experts: every token passes through its top k of E small MLPs, weighted by a router
    routing         Which experts a token passes through, and with which weights
    routing_config  The part of a ModelConfig about the choice of experts, if it is another than a softmax's largest
                    shares
    shares          Whether the experts of a model can be shared out over ranks
"""
