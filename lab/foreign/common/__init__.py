"""Parts that programs of others share: their processes, their packages, questions and answers, our pool.

Files:
    checks       Questions about documents, and whether their greedy answers equal those of one vLLM alone
    completions  Greedy completions by token ids, from servers that also answer token ids, as vLLM does
    our_pool     Three store nodes of ours as programs of others see them: addresses, contents, a lost node, a restart
    packages     Packages for the interpreter of another program, in a folder for its PYTHONPATH
    processes    A server of others as a process: how it is started, watched, paused and ended
"""
