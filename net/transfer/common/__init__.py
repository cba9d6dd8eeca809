"""What every transport of the transfer engine shares.

Files:
    copying            Copying inside this host's memory without holding up the event loop for long
    landed             What of a submission has arrived: the status of every span
    memory             Region: one named span of memory that transfers read and write
    path               How this node reaches a peer for transfers, and what a transfer has done
    prefault           An arena gets its pages before somebody waits for them
    private_directory  A temporary directory of one process, that is swept when its process was killed
    rails              Several ways to one peer, their health and their speed
    spans              Which bytes a transfer moves
    topology           Which network cards are near which memory, and which cards of two nodes are one rail
    traffic            What has been moved between this node and one peer: sums, a latency histogram
    transport          What the transfer engine asks of a transport
"""
