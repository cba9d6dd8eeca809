"""Groups of prefill nodes that compute one long prompt: which nodes, and how they divide it. Pure.

Files:
    context     Groups that divide the tokens of a prompt: context parallelism, the rival of pipelines
    giving_way  Which of two prompts ends when each waits for blocks that the other holds: no prompts wait in a circle
    group       The nodes and the prompt that a group is chosen for, the chosen group, and whether it is worth it
    pipeline    Groups that divide the layers: chunked pipeline parallelism
"""
