"""Where a request is prefilled and decoded: Algorithm 1 of the Mooncake paper and its rivals, one class each. Pure.

demand.py     what a request needs
view.py       the known state of the nodes, in columns
links.py      predicted transfers
costs.py      Algorithm 1's estimates of every node at once
few.py        the same choice over a few nodes, in plain floats
choice.py     the decision and its inputs
two_stages.py the common part of all policies: a prefill node, then a decode node for it
mooncake.py   ours: gossip makes the shortlist, fresh load words decide
central.py    the paper's: asks all nodes, the least estimate wins
learned.py    ours with a predictor that may choose inside the rule's envelope
rivals.py     random, round-robin, least-load, local-cache, power-of-two, dynamo-cost
table.py      the policies by their names on the command line
"""
