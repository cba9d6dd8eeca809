"""Workers of others behind our acceptor (--backend): vLLM's servers, or nodes of ours.

A worker does the whole request. This node tokenises, places by the policy of --placement, forwards the token ids as a
completion, and places the request again when a worker is lost. It knows a worker by its /metrics, by the KV events that
it publishes, and by the times of its answers.

Files:
    answer    The answer of a worker: the chunks of a streamed completion, as tokens
    attempts  Attempts of accepted requests on workers: asks one, passes on its tokens, and hangs up when the client
              does
    fleet     All workers of --backend: opened, watched and reported
    load      The load of one worker as this acceptor sees it: its own requests there, and what the worker tells of
              all
    placing   From a request to a worker: the policy of --placement over the known loads and prefixes of all workers
    prefixes  The prefixes that one worker holds, from its KV events
    question  The question to a worker: POST /v1/completions in vLLM's form, with the prompt as token ids
    told      The load that a worker tells: the lines of its /metrics that vLLM and our nodes have in common
    worker    One worker behind this acceptor: whether it answers, its load, and the prefixes it holds
"""
