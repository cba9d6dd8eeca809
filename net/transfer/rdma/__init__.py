"""RDMA: one-sided reads and writes by the network card, over libibverbs.

Files:
    build              The cffi module around libibverbs, compiled on first use into the user's cache
    completion_shares  How many entries of a device's completion queues each queue pair may fill
    device             One RDMA device of this machine: its queues of completions and events on the event loop
    endpoint           What one side of a connection tells the other about its queue pair
    gids               Which address (GID) of a device its connections use
    job                What a submission is while it is under way: its slices, how many are in queues
    link               The submitting end of RDMA to one peer: queue pairs on every rail, slices striped over them
    places             Where cards, GPUs and memory are on this machine
    pump               What is under way to one peer: jobs, their slices in the queues of the rails
    questions          Questions and answers on the TCP connection of an RDMA link
    queue_pair         One end of a reliable connection (RC queue pair) and its life
    registrations      Memory that a card may use
    revival            Broken rails of a link, brought back: fenced on the other side first
    send_queue         Bookkeeping of a send queue: credits and selective signalling
    shim.c             What Python may not do once per slice: a whole batch is posted
    target             The passive end of RDMA: queue pairs through which one peer reads and writes this node's
                       regions
    transport          RDMA as a transport of the transfer engine: devices, who may reach whom
    verbs              Libibverbs for the rest of net/rdma: loaded on the first call
"""
