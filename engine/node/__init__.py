"""One node, wired; how it starts, reports and leaves.

Files:
    drain         `python mooncake.py drain --url http://NODE`: the node leaves without dropping a request
    engine        The engine of a prefill, decode or mixed node: KV arena, batcher, model loop
    front_door    How clients get into a node: acceptor and HTTP API
    frontend      What the HTTP API of this node is made of: the tokenizer
    leaving       How a node leaves without dropping a request: POST /drain, `mooncake.py drain`, and SIGTERM
    local_store   This node's share of the pooled store: a DRAM arena
    node          One node, wired: channel and transfer engine, store share, gossip, HTTP API, engine
    parts         What the parts of a node are made with, in groups: its blocks, what it measures of itself
    phases        Where the time of a start went
    prefault      Which memory of a node is populated ahead, when, and how much of the machine it may take
    report        The reports of a node about itself: for the user who started it, for a joining node
    resource_use  How full the tiers of this node are and how busy its network is
    role_changes  The shell of sched/role_change.py
    scrape        Which parts of a node a scrape reads
"""
