"""Transfers inside one host: shared memory.

Files:
    lifeline   A Unix socket between two processes of one host that passes memfds and notices
    server     The side of shared memory that owns the regions: gives memfds to peers
    transport  Shared-memory transport: on one host, a transfer is a memory copy by the submitter
"""
