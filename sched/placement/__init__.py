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

Files:
    arrivals        The arrival rate of requests at one acceptor
    burst           A choice that the acceptor can repeat with new information
    central         Algorithm 1 as in the paper, with a central Conductor that knows every queue: ask all nodes
    choice          A decision with all its inputs, for `explain` and for a later comparison with the measured times
    costs           Algorithm 1's estimates for every node of a view at once
    demand          What a request needs from its prefill node and its decode node
    few             Algorithm 1 over a few nodes, in plain floats
    learned         A learned choice inside a robust envelope
    links           Predicted transfers between nodes as columns: seconds = latency + bytes * seconds per byte
    match           Estimates how much of a prompt each node holds, from the digests
    measured_links  Transfer times between nodes, learned from the transfers that requests report and from the rail
                    rates of nodes
    mooncake        Algorithm 1 without a centre: gossip makes a shortlist, and fresh load words decide
    pooled          How much of the pool's prefix is worth a fetch
    record_table    The table of a view: its columns, and their values from load records
    rivals          The alternatives to Algorithm 1: baselines of the paper and of other systems
    table           Placement policies by their names on the command line
    two_stages      The common part of all policies: choose a prefill node, then a decode node for it
    view            The known state of the nodes, in columns
"""
