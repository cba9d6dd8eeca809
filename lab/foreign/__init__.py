"""Programs of others, started as their documents say.

Files:
    behind        vLLM workers behind acceptors of ours: started together, for checks and benchmarks of --backend
    completions   Greedy completions by token ids, from servers that also answer token ids, as vLLM does
    event_reader  Reads a node's KV events with vLLM's own classes
    processes     A server of others as a process: how it is started, watched, paused and ended
    vllm_server   vLLM's OpenAI server on CPU cores, from a virtual environment of its own
"""
