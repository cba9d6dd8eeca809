"""Upstream's mooncake.engine on our transfers.

Files:
    borrowed_region  Memory of the calling program as a region of our transfers
    core             One program's end of transfers between programs, on an event loop
    messages         The messages between transfer engines of programs
    ranges           The memory that one side has registered, by address
    transfer_engine  TransferEngine and TransferNotify: upstream's calls for transfers between programs, answered by
                     our transfers
"""
