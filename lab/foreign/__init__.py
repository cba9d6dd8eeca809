"""Programs of others, started as their documents say.

Files:
    backend_checks     Our acceptor in front of two vLLM workers (--backend): the same tokens, prefixes by events,
                       hang-ups, a lost worker
    behind             vLLM workers behind acceptors of ours: started together, for checks and benchmarks of --backend
    checks             Questions about documents, and whether their greedy answers equal those of one vLLM alone
    completions        Greedy completions by token ids, from servers that also answer token ids, as vLLM does
    engines            Several vLLM processes that share the cores of this machine, each with settings of its own
    event_reader       Reads a node's KV events with vLLM's own classes
    kv_events          vLLM's own classes read the KV events of a node of ours, and find exactly the blocks that it
                       holds
    our_pool           Three store nodes of ours as programs of others see them: addresses, contents, a lost node, a
                       restart
    packages           Packages for the interpreter of another program, in a folder for its PYTHONPATH
    pair_proxy         One address for a vLLM that computes prompts and a vLLM that decodes, both with
                       MooncakeConnector
    processes          A server of others as a process: how it is started, watched, paused and ended
    vllm_checks        vLLM with upstream's connectors, unmodified, and with ours: greedy tokens must equal those of
                       one vLLM alone
    vllm_connectors    The settings of vLLM's two connectors of upstream: MooncakeStoreConnector and MooncakeConnector
    vllm_own           The settings of vLLM with our own connector, and what its metrics say
    vllm_own_checks    Our own connector in vLLM: one pool of two processes; a process that computes prompts, and one
                       that decodes
    vllm_server        vLLM's OpenAI server on CPU cores, from a virtual environment of its own
    vllm_store_checks  MooncakeStoreConnector of two vLLM processes on three nodes of ours: shared prefixes, a lost
                       node, a restart
    contracts/         Classes of ours against the released packages that load them, in the interpreters where those
                       are installed
"""
