"""RDMA: messages and answers of net/rounds that network cards write into the memory of the other host.

Files:
    meeting       Two processes that have met over TCP connect queue pairs, or agree that messages go over TCP
    mirror        Memory of which parts are written to the same places of another process, by RDMA
    offer         The RDMA devices that each of two processes has for messages, and what follows from both
    rdma_desk     A RemoteDesk whose messages and answers are written by network cards
    rdma_outpost  The answering end of an RdmaDesk, with the calls of an Outpost
    ways          How messages may go between this process and one of another host: flags, as far as they matter
"""
