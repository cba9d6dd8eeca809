"""Measures the Python calls of mooncake.store and mooncake.engine on our pool and in upstream's wheel.

Files:
    client_program  A client of mooncake.store in a process that has upstream's module or ours; it imports nothing
                    else of ours
    command         mooncake.store on our pool next to upstream's released wheel, through the same Python calls, in
                    one run
"""
