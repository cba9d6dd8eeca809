"""Mixtures of experts over several processes of a node: each rank has a share of the experts.

Rank 0 schedules, computes attention, and asks the other ranks for the results of experts (net/rounds/). A rank that is
lost takes experts with it and nothing else.

Files:
    balance    Decides when experts move, and where: loads by the choices that were counted since the last look
    collect    The end of a round: waits for answers, and gives up ranks that are silent
    eplb       Decides which experts get more than one copy, and on which ranks the copies lie: DeepSeek's EPLB
    group      ExpertGroup: the experts of all ranks as rank 0 calls them, layer by layer
    loading    A share of the experts gets its weights: from ranks that have them, the others from the checkpoint
    placement  Which rank has which experts, in which of its slots
    plan       The sizes that all ranks of a node agree on
    processes  ExpertProcesses: the other ranks as child processes: started, watched, started again
    share      The experts of one rank, in memory that the other ranks of the host can read
    work       The work of a message: products of experts, or the copy of an expert from another rank
    worker     The process of a rank above 0: it loads its share of the experts, then answers rank 0
"""
