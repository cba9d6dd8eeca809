"""Programs of others, started as their documents say.

Files:
    completions  Greedy completions by token ids, from servers that also answer token ids, as vLLM does
    processes    A server of others as a process: how it is started, watched, paused and ended
    vllm_server  vLLM's OpenAI server on CPU cores, from a virtual environment of its own
    contracts/   Classes of ours against the released packages that load them, in the interpreters where those are
                 installed
"""
