"""Mixtures of experts over several processes of a node: each rank has a share of the experts.

Rank 0 schedules, computes attention, and asks the other ranks for the results of experts (net/rounds/). They are on its
host, or on others. A rank that is lost takes experts with it and nothing else.

Files:
    collect        The end of a round: waits for answers, and gives up ranks that are silent
    dispatch       The rows of a round, out to the desks of the ranks and back from their answers
    group          ExpertGroup: the experts of all ranks as rank 0 calls them, layer by layer
    joining        A process of another host becomes a rank of a node: what both say before the first message
    loading        A share of the experts gets its weights: from ranks of its host that have them, the others from the
                   checkpoint
    mover          Brings experts of one layer to other ranks, between two steps
    plan           The sizes that all ranks of a node agree on
    processes      ExpertProcesses: the other ranks: child processes that are started, watched and started again, and
                   remote_ranks.py
    pulling        An expert that no rank of the node's host has is pulled from one elsewhere, or else read from the
                   checkpoint
    rank_command   `mooncake.py expert-rank --join HOST:PORT`: this process is a rank of a node on another host, or of
                   several nodes
    remote_ranks   The ranks on other hosts, as the node sees them: they connect, get their share, and come back
    remote_worker  The process of a rank on another host than the node's: it joins, gets its share, answers rank 0,
                   and joins again
    share          The experts of one rank, in memory that the other ranks of the host can read
    shared_rank    The process of a rank that several nodes share: it answers each of them, and goes on when one is
                   lost
    sharing        Nodes that share the ranks of their experts: they know each other by gossip
    work           The work of a message: products of experts, or an expert from another rank
    worker         The process of a rank above 0 on the node's host: it loads its share of the experts, then answers
                   rank 0
    placing/       Where experts lie: which rank has which, how many copies, and how they move
"""
