"""Transfers over TCP.

Files:
    blocking_calls  Bulk calls of threads without an event loop
    blocking_rail   One data connection on which a thread without an event loop asks bulk calls, one at a time
    bulk_call       Bulk calls: questions over a data connection, with bytes after the question or after its answer
    bulk_calls      The node's bulk calls (net/transfer/tcp/bulk_call.py) to peers that it reaches over TCP
    bulk_server     The answering end of bulk calls (net/transfer/tcp/bulk_call.py) on one data connection
    bundle          The data connections to one peer: slices are striped over them and resent on another one if a
                    connection breaks
    coding          Coded frames: bytes that a data connection carries as a frame of net/codec/exponents.py, if that
                    pays
    pushing         Sends the bytes of a transfer over a data connection: frames in turns, as fast as the peer reads
    rail            The submitting end of one data connection: its transfers and the peer's answers
    server          The serving end of a data connection: answers READ with bytes of its regions, and stores the bytes
                    of WRITE in them
    transport       TCP transport: bulk data on separate connections, received directly into the destination
"""
