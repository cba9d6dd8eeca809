"""vLLM with upstream's connectors and with ours, its settings and checks.

Files:
    command       vLLM with upstream's connectors, unmodified, and with ours: greedy tokens must equal those of one
                  vLLM alone
    connectors    The settings of vLLM's two connectors of upstream: MooncakeStoreConnector and MooncakeConnector
    engines       Several vLLM processes that share the cores of this machine, each with settings of its own
    own           The settings of vLLM with our own connector, and what its metrics say
    own_checks    Our own connector in vLLM: one pool of two processes; a process that computes prompts, and one that
                  decodes
    pair_proxy    One address for a vLLM that computes prompts and a vLLM that decodes, both with MooncakeConnector
    server        vLLM's OpenAI server on CPU cores, from a virtual environment of its own
    store_checks  MooncakeStoreConnector of two vLLM processes on three nodes of ours: shared prefixes, a lost node, a
                  restart
"""
