"""Transfers over TCP.

Files:
    bulk_call    Bulk calls: questions over a data connection
    bulk_calls   The node's bulk calls (net/transfer/tcp/bulk_call.py) to peers that it reaches over TCP
    bulk_server  The answering end of bulk calls (net/transfer/tcp/bulk_call.py) on one data connection
    bundle       The data connections to one peer
    pushing      Sends the bytes of a transfer over a data connection: frames in turns
    rail         The submitting end of one data connection: its transfers and the peer's answers
    server       The serving end of a data connection: answers READ with bytes of its regions
    transport    TCP transport: bulk data on separate connections, received directly into the destination
"""
