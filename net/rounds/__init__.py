"""Rounds: a process sends one message to each of several others, and takes one answer from each.

The messages of a round are rows: those of a token go once to every rank that has work for it. The answers are rows too,
one per token and rank, and are added up. A rank that is silent for too long is given up; the round ends without it.

Files:
    asking_nodes    The nodes that a process answers: those it was started with, and those that they name
    bell.h          Words in shared memory that one process sets and another waits for: spinning first, then asleep in
                    the kernel
    connected_desk  A desk whose answering process was started by somebody else, and has come to this one over TCP
    desk            The shared memory between the process that asks and one that answers
    door            Where processes that answer come to a process that asks, and who else asks them
    fair_queue      Decides whose work is next, when several processes ask one: each gets the same share of the work
    frame_socket    A TCP connection with frames of net/channel/wire.py, for threads that wait
    lanes.h         The float32 numbers of one register, read from and written to elements of three types
    layout          Where the parts of a message lie
    native          rounds.c as Python sees it: the description of a dispatch, mirrored field by field, and the calls
    near            Two processes of one host that have met over TCP go on in shared memory
    near_desk       A desk in memory that is shared with a process of this host which was started by somebody else
    near_outpost    The answering end of a NearDesk, with the calls of an Outpost
    outpost         The answering end of a RemoteDesk
    remote_desk     A desk whose answering process is on another host, behind a TCP connection
    rounds.c        A round: one process asks several others, and takes their answers
    rows.h          Rows of a message: elements of three types, codes of one byte, sums in float32
    silence         Decides which ranks are given up: those that show no sign of life, or no answer, for too long
    turns           Threads that answer for several processes work one at a time, in the order of a FairQueue
    rdma/           RDMA: messages and answers of net/rounds that network cards write into the memory of the other
                    host
"""
