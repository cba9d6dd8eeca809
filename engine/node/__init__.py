"""One node, assembled: how it starts, reports and leaves.

Files:
    common_transport  Refuses to join a cluster whose nodes have no transport in common with this one
    drain             `python mooncake.py drain --url http://NODE`: waits until the node has left without dropping a
                      request
    engine            The engine of a prefill, decode or mixed node: KV arena, batcher, model loop, and its service
                      for other nodes
    front_door        A node's entrance for clients: acceptor and HTTP API
    frontend          The Frontend of this node's HTTP API: the tokenizer, the acceptor and the state of the node
    history_recorder  The shell of engine/observe/history.py: tells a node's history what only its parts know, once
                      per second
    kv_events         Tells others which blocks this node's arena holds: KV events in vLLM's form
    leaving           Leaves without dropping a request: POST /drain, `mooncake.py drain`, and SIGTERM
    lending           Which requests the node takes, as it tells others, also beyond memory; and the start of its
                      lending side
    local_store       This node's share of the pooled store: a DRAM arena and, if a path is given, an SSD tier below
                      it
    node              One node, assembled: channel and transfer engine, store share, gossip, HTTP API, engine
    parts             The inputs of a node's parts, in groups: its blocks, its measurements, its services
    phases            The time of each part of the startup
    prefault          Decides which memory of a node is populated in advance, when, and how much of the machine it may
                      use
    prefix_reset      POST /reset_prefix_cache: all nodes of the cluster forget the KV that no request uses, so the
                      next one is cold
    report            A node's reports about itself: for the user who started it, for a joining node, for debugging
    resource_use      How full the tiers of this node are and how busy its network is
    scrape            The parts of a node that a scrape reads
    weights           The weights of a node, assembled: what it serves, how it follows the cluster, and what it
                      replaces itself
"""
