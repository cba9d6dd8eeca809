"""Groups of prefill nodes that compute one long prompt: which nodes, and how they divide it. Pure.

Files:
    context   Groups that divide the tokens of a prompt: context parallelism, the rival of pipelines
    group     What is known of the nodes and of the prompt, the group that is chosen, and whether it is worth it
    pipeline  Groups that divide the layers: chunked pipeline parallelism
"""
