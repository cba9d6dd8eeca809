"""The common parts of all transports of the transfer engine.

Files:
    copying            Copies memory on this host without blocking the event loop for long
    holds              Threads without an event loop that write into mapped memory of a peer: until they end, the
                       peer's fence waits
    landed             Which spans of a submission have arrived, also if it failed half-way
    memory             Region: one named span of memory that transfers read and write
    path               The path to a peer for transfers, and the result of a transfer
    prefault           Populates an arena's pages before they are needed
    private_directory  A temporary directory of one process; later processes remove it if its owner was killed
    rails              Several paths to one peer, their health and their speed
    spans              The byte ranges that a transfer moves
    topology           Which network cards are near which memory, and which cards of two nodes form a rail
    traffic            Traffic between this node and one peer: sums, a latency histogram, and a rate limit for
                       experiments
    transport          The interface of a transport
"""
