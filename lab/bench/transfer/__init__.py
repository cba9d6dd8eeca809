"""Parts of scripts/bench.py transfer: contenders in pairs of processes over the same two arenas.

Files:
    agent           One process of a contender: takes orders on a socket, moves blocks between the two arenas
    command         The transfer engine beside raw memcpy, raw blocking sockets
    contenders      All contenders of one run, cell by cell: equal rounds for each
    disk            The SSD tier beside the disk's own limit
    mooncake_store  Upstream's store over TCP: its master and a holder in the owner's process
    mooncake_te     Mooncake-transfer-engine(-non-cuda) over TCP, with its batch calls
    network         One congestion control for every contender
    nixl            Nixl-cu12 with its UCX back end and default transports
    ours            This project's transfer engine under uvloop: two nodes, one region each
    ours_store      This project's pooled store: a home with one share in the owner's process
    pairs           A contender's two processes, as the benchmark drives them; and the two arenas
    raw             The limits: libc memcpy in one thread or two, and blocking sockets (sendall, recv_into)
    shared          What the benchmarks transfer and store have in common: flags of the grid, the table
    stall           How late an event loop runs: a kernel timer that fires every half millisecond
    store_command   The pooled store beside upstream's and beside the limits of this machine, in one run
    verdict         From cells to rows and goals, as ratios between contenders of one run
"""
