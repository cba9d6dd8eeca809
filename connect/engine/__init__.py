"""Upstream's mooncake.engine on our transfers.

Files:
    answers          Reads and writes of other programs, over TCP, in the memory that this one has registered
    arguments        Arguments of upstream's transfer calls, as ours need them
    batches          Transfers that run while the caller goes on, by number
    borrowed_region  Memory of the calling program as a region of our transfers
    core             One program's end of transfers between programs, on an event loop
    messages         The messages between transfer engines of programs
    mover            Moves bytes between this program's memory and another's, in the calling thread where that is
                     possible
    questions        ReadQuestion and WriteQuestion: bytes between this program's memory and another program's, over
                     TCP
    ranges           The memory that one side has registered, by address
    reach            By which ways a program's transfers may go
    transfer_engine  TransferEngine and TransferNotify: upstream's calls for transfers between programs, answered by
                     our transfers
"""
