"""torch.distributed over our collectives: the backends `mooncake` and `mooncake-cpu`.

Files:
    group     MooncakeProcessGroup: torch's process group on net/collectives/
    options   MooncakeBackendOptions and what upstream sets for a whole process
    register  Registers the backends, and upstream's functions about members and failures
    tensors   Tensors as the raw memory that net/collectives/ works on
    work      MooncakeWork: torch's handle of a call that may still run, and the thread that runs calls
"""
