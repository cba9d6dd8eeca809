"""Collectives of several processes on raw memory: over shared memory on one host, over sockets between hosts.

Files:
    calls          The collectives of one epoch of a group, on raw memory
    collectives.c  Collective calls of ranks on one host through their stages
    epochs         The members of a group, and how they change: by losses, by agreement among those that are left, by
                   joining
    errors         Errors of collective calls
    exchange       ExchangeCalls: the collectives over the sockets between the ranks, for groups on more than one host
    group          RankGroup: the collectives of several processes on raw memory
    link           The stream socket between two ranks
    mailbox        The messages that have come to this rank, and the receives that wait for them
    matching       Which message belongs to which receive: the first that fits, in the order in which they came
    meeting        Ranks find and reach each other: addresses in a store that all can read, one stream socket between
                   any two
    membership     Decides which members go on together after some of them are gone: those that report the same
    native         collectives.c as Python sees it: the state of a group, mirroring turns.h field by field, and the
                   calls
    peers          The other ranks of a group as this process reaches them: sockets, segments, losses, and what they
                   report
    plan           Decides how a collective call runs: which algorithm, how long a rank spins, what may be reduced
    reduce.h       Reductions over the tensors of several ranks: sum, mean, product, minimum, maximum, bits; one pass
                   over every input
    reduce_type.h  The reductions of one element type
    shared         SharedCalls: the collectives of ranks on one host, in C, through segments that all of them map
    ticket         One operation that ends later, in another thread
    turns.h        Turns of ranks on one host: each rank writes its own segment, and the others, who have mapped it,
                   read it
"""
