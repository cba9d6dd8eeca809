"""Where experts lie: which rank has which, how many copies, and how they move. Pure.

Files:
    added      Which experts a rank gets that joins beyond the least number of ranks
    balance    Decides when experts move, and where: loads by the choices that were counted since the last look
    eplb       Decides which experts get more than one copy, and on which ranks the copies lie: DeepSeek's EPLB
    hosts      Copies of an expert on different hosts, so that the loss of a host loses no expert that has several
    moves      A move: experts of one layer change their ranks, between two steps
    placement  Which rank has which experts, in which of its slots
"""
