"""Measures our pool as other engines use it, next to upstream's wheel: the Python calls, and vLLM with both.

Files:
    client_program       A client of mooncake.store in a process that has upstream's module or ours; it imports
                         nothing else of ours
    command              mooncake.store on our pool next to upstream's released wheel, through the same Python calls,
                         in one run
    vllm_command         vLLM alone, with upstream's store and with ours: reused prefixes, the cost of a miss, a load
                         of several turns
    vllm_configurations  vLLM with and without a store: what each configuration of scripts/bench.py connect-vllm
                         starts, and its settings
    vllm_load            What each configuration of scripts/bench.py connect-vllm is asked, and what is measured of
                         its answers
"""
