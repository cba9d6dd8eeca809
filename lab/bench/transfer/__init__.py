"""Parts of scripts/bench.py transfer: contenders in pairs of processes over the same two arenas.

Files:
    agent           One process of a contender: receives commands on a socket, moves blocks between the two arenas,
                    and measures itself
    command         The transfer engine against raw memcpy, raw blocking sockets, Mooncake's Transfer Engine and NIXL,
                    in one run
    contenders      All contenders of one run, cell by cell: equal rounds for each, and a new process after a failure
    disk            The SSD tier on each of its media next to fio, in one run: put into a new file, put over evicted
                    blocks, get
    fio             fio on the file system of the SSD tier: the same operations on the disk as the tier, without the
                    tier
    mooncake_store  Upstream's store over TCP: its master and a holder in the owner's process, a client without a
                    segment
    mooncake_te     mooncake-transfer-engine(-non-cuda) over TCP, with its batch calls
    network         One congestion control for every contender
    nixl            nixl-cu12 with its UCX back end and default transports
    ours            This project's transfer engine under uvloop: two nodes, one region each
    ours_store      This project's pooled store: a home with one share in the owner's process, a client without a
                    share in the other
    paced           A TCP link of a given rate inside this host: the kernel paces what this process sends to one port
    pairs           Controls a contender's two processes and the two arenas, and verifies their content
    raw             The limits: libc memcpy in one or two threads, and blocking sockets (sendall, recv_into), in plain
                    Python
    shared          The common parts of the benchmarks transfer and store: flags of the grid, the table, the goals
    stall           How late an event loop runs: the loop reads a kernel timer that fires every 0.5 ms
    store_command   The pooled store, upstream's store and the limits of this machine, in one run
    verdict         Computes rows and goals from cells, as ratios between contenders of one run
"""
