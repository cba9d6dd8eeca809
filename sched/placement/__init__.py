"""Where a request is prefilled and decoded: Algorithm 1 of the Mooncake paper and its rivals, one class each. Pure.

Files:
    arrivals        The arrival rate of requests at one acceptor
    burst           A choice that the acceptor can repeat with new information
    central         Algorithm 1 as in the paper, with a central Conductor that knows every queue: ask all nodes,
                    choose the least TTFT
    cheapest        Placement by cost under the objective: of the nodes that meet it, one of the cheapest; if none
                    does, the fastest
    choice          A decision with all its inputs, for `explain` and for a later comparison with the measured times
    costs           Algorithm 1's estimates for every node of a view at once
    demand          The demands of a request on its prefill node and its decode node
    few             Algorithm 1 over a few nodes, in plain floats
    learned         A learned choice inside a robust envelope
    links           Predicted transfers between nodes as columns: seconds = latency + bytes * seconds per byte
    match           Estimates how much of a prompt each node holds, from the digests
    measured_links  Transfer times between nodes, learned from the transfers that requests report and from the rail
                    rates of nodes
    mooncake        Algorithm 1 without a centre: gossip makes a shortlist, and fresh load words decide
    phases          Rivals that put prefill and decode on the same nodes: the question is which node does how much of
                    which
    pooled          How much of the pool's prefix is worth a fetch: it may take longer to read from SSD than to
                    compute
    record_table    The table of a view: its columns, and their values from load records
    rivals          The alternatives to Algorithm 1: baselines of the paper and of other systems, each in a few lines
    table           Placement policies by their names on the command line
    two_stages      The common part of all policies: choose a prefill node, then a decode node for it
    view            The known state of the nodes, in columns: a decision evaluates all nodes in a dozen vector
                    operations
    groups/         Groups of prefill nodes that compute one long prompt: which nodes, and how they divide it
    sites/          Sites: which site a request goes to, how far the sites are, and which fetches between them save
                    time
"""
