"""Control messages between nodes: frames, connections, calls and posts.

Files:
    channel        Control messages between nodes: calls with an answer, and posts without one
    cluster_key    --cluster-key-file: the keyring from the current content of the file, so that keys are rotated
                   without a restart
    congestion     Chooses the congestion control of data connections
    connection     One TCP connection to a peer: it exchanges hellos, then frames in both directions
    doorstep       Limits connections that have not sent their hello yet, in total and per address
    keyring        The cluster key: secrets shared by all nodes
    links          All TCP connections of one node: the addresses of peers, which side connects, and when a peer
                   counts as lost
    peer           The facts that a node has about a peer: its address, its connections, and the calls that wait for
                   one
    sealed_stream  Sealed streams: a TCP connection encrypted and authenticated with the cluster key
    send_order     The order in which the transfers of one node may send: the most urgent first, on all its data
                   connections together
    sockets        Binds the HTTP listening socket before any slow work, and the control port that belongs to it
    stream         One TCP connection as frames in both directions, in clear or sealed with the cluster key
    turns          The transfers of one connection each send one frame per turn of the loop, in the order of their
                   requests
    wire           Frames: splits a byte stream between two nodes into messages
"""
