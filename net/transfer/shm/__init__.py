"""Transfers inside one host: shared memory.

Files:
    lifeline   A Unix socket between two processes of one host that carries memfds and notices
    server     The owner's side of shared-memory regions: gives memfds to peers
    transport  Shared-memory transport: on one host, a transfer is a memory copy by the submitter
"""
