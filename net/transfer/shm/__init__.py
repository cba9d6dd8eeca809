"""Transfers inside one host: shared memory.

Files:
    lifeline   A Unix socket between two processes of one host that carries memfds and notices
    server     The owner's side of shared-memory regions: gives memfds to peers, tells them which regions are gone,
               waits for them
    transport  Shared-memory transport: on one host, a transfer is a memory copy by the submitter; the other side does
               nothing
"""
