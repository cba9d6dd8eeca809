"""How bytes move: frames, channels, transports, HTTP.

Files:
    bodies        Bodies of messages as dataclasses: checked when they are read, plain JSON on the wire
    body_readers  Readers of types in JSON form: the checks behind net/bodies.py
    body_writers  Writers of types in JSON form, for net/bodies.py
    compiled      Native code that is compiled at first use and kept in $XDG_CACHE_HOME/mooncake, or ~/.cache/mooncake
    errors        Errors between two nodes, for callers of the channel and the transfer engine
    user_file     Loads a class from a user's file: `--eviction mine.py:NAME`, and every other flag that takes
                  FILE.py:NAME
    channel/      Control messages between nodes: frames, connections, calls and posts
    codec/        Codes floats without loss for slow links
    collectives/  Collectives of several processes on raw memory: over shared memory on one host, over sockets between
                  hosts
    gossip/       The shell of gossip: one UDP socket, and load words read over the transfer engine
    http/         The OpenAI API of a node
    kv_events/    KV events in vLLM's form: which blocks a node holds, told over ZeroMQ
    loop/         The health of a node's event loop: tasks, clocks, deadlines, stalls
    metrics/      A node's Prometheus metrics
    rounds/       Rounds: a process sends one message to each of several others, and takes one answer from each
    transfer/     The transfer engine: spans of bytes between registered regions of two nodes
"""
