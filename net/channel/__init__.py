"""Control messages between nodes: frames, connections, calls and posts.

Files:
    channel        Control messages between nodes: calls that are answered, posts that are not
    cluster_key    --cluster-key-file: the keyring as the file has it now
    congestion     Which congestion control data connections use
    connection     One TCP connection to a peer: the exchange of hellos, then frames in both directions
    doorstep       Limits connections that have not sent their hello yet, in total and per address
    keyring        The cluster key: secrets that all nodes share
    links          All TCP connections of one node: where peers are, who connects to whom
    peer           What a node knows of another: where it is, its connections, and who waits for one
    sealed_stream  Sealed streams: a TCP connection encrypted and authenticated with the cluster key
    sockets        The HTTP listening socket, taken before anything slow happens
    stream         One TCP connection as frames in both directions, in clear or sealed with the cluster key
    turns          The transfers of one connection send one frame each per turn of the loop
    wire           Frames: how a byte stream between two nodes is cut into messages
"""
