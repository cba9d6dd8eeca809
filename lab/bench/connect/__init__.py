"""Measures our pool as other engines use it, next to upstream's wheel: the Python calls, and vLLM with both.

Files:
    client_program       A client of mooncake.store in a process that has upstream's module or ours; it imports
                         nothing else of ours
    command              mooncake.store and mooncake.engine of ours next to upstream's wheel, through the same Python
                         calls
    engine_program       One end of the transfers of mooncake.engine, in a process that has upstream's module or ours
    engine_rows          mooncake.engine between two programs of this host: ours in two ways, upstream's wheel, and
                         memcpy
    latencies            Rows and goals of scripts/bench.py connect: times of calls, ours next to those of others
    programs             Programs of scripts/bench.py connect: processes that answer JSON questions, line by line
    store_rows           mooncake.store: clients of our pool, over shared memory and over TCP, and of upstream's wheel
    vllm_command         vLLM alone, with upstream's store and with ours: reused prefixes, the cost of a miss, a load
                         of several turns
    vllm_configurations  vLLM with and without a store: what each configuration of scripts/bench.py connect-vllm
                         starts, and its settings
    vllm_load            The requests to each configuration of scripts/bench.py connect-vllm, and what is measured of
                         the answers
"""
