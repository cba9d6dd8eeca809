"""RDMA: one-sided reads and writes by the network card, over libibverbs.

Files:
    build              The cffi module around libibverbs, compiled on first use into the user's cache
    card               An open RDMA device: its port, its completion queues, its events, and memory that it may use
    completion_shares  The number of completion queue entries of a device that each queue pair may fill
    device             A card whose completions and events are handled on the event loop, and the memory that is
                       registered with it
    endpoint           The description of a queue pair that each side of a connection sends to the other
    gids               Chooses the address (GID) of a device for its connections
    job                A running submission: its slices, how many are in queues, and the events that it still waits
                       for
    link               The submitting end of RDMA to one peer: stripes slices over queue pairs on every rail, resends
                       them on failure
    places             The locations of cards, GPUs and memory on this machine, from the kernel, for
                       net/transfer/common/topology.py
    pump               Work in flight to one peer: jobs, their slices in the queues of the rails, and their
                       completions
    questions          Questions and answers on the TCP connection of an RDMA link
    queue_pair         One end of a reliable connection (RC queue pair) and its life: reset -> init -> ready -> error
                       -> reset
    registrations      Memory that a card may use
    revival            Restores broken rails of a link: fences them on the other side, then opens them as a new
                       generation
    send_queue         Bookkeeping of a send queue: credits and selective signalling
    shim.c             Work that Python must not do for each slice: one call posts a whole batch, or polls all
                       completions
    target             The passive end of RDMA: queue pairs through which one peer reads and writes this node's
                       regions
    transport          RDMA as a transport of the transfer engine: devices, reachable peers, links to peers and
                       targets for them
    verbs              libibverbs for net/transfer/rdma: loaded on the first call; if it is missing, one line gives
                       the reason
"""
