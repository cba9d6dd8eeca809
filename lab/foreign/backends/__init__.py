"""Our acceptor in front of vLLM workers (--backend).

Files:
    command  Our acceptor in front of two vLLM workers (--backend): the same tokens, prefixes by events, hang-ups, a
             lost worker
    workers  vLLM workers behind acceptors of ours: started together, for checks and benchmarks of --backend
"""
