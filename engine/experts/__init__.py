"""Mixtures of experts over several processes of a node: each rank has a share of the experts.

Rank 0 schedules, computes attention, and asks the other ranks for the results of experts (net/rounds/). They are on its
host, or on others. A rank that is lost takes experts with it and nothing else.

Files:
    added          Which experts a rank gets that joins beyond the least number of ranks
    balance        Decides when experts move, and where: loads by the choices that were counted since the last look
    collect        The end of a round: waits for answers, and gives up ranks that are silent
    eplb           Decides which experts get more than one copy, and on which ranks the copies lie: DeepSeek's EPLB
    group          ExpertGroup: the experts of all ranks as rank 0 calls them, layer by layer
    joining        A process of another host becomes a rank of a node: what both say before the first message
    loading        A share of the experts gets its weights: from ranks that have them, the others from the checkpoint
    moves          A move: experts of one layer change their ranks, between two steps
    placement      Which rank has which experts, in which of its slots
    plan           The sizes that all ranks of a node agree on
    processes      ExpertProcesses: the other ranks: child processes that are started, watched and started again, and
                   remote_ranks.py
    rank_command   `mooncake.py expert-rank --join HOST:PORT`: this process is a rank of a node on another host
    remote_ranks   The ranks on other hosts, as the node sees them: they connect, get their share, and come back
    remote_worker  The process of a rank on another host than the node's: it joins, gets its share, answers rank 0,
                   and joins again
    share          The experts of one rank, in memory that the other ranks of the host can read
    work           The work of a message: products of experts, or an expert from another rank
    worker         The process of a rank above 0 on the node's host: it loads its share of the experts, then answers
                   rank 0
"""
