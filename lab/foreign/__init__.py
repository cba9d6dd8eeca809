"""Programs of others, started as their documents say.

Files:
    backends/   Our acceptor in front of vLLM workers
    common/     Parts that programs of others share: their processes, their packages, questions and answers, our pool
    contracts/  Classes of ours against the released packages that load them, in the interpreters where those are
                installed
    events/     vLLM's own classes read the KV events of our nodes
    vllm/       vLLM with upstream's connectors and with ours, its settings and checks
"""
