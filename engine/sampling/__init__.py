"""From logits to tokens: penalties, draws, and randomness that does not depend on where a request runs.

Files:
    grammar         Structured output: which tokens may follow, so that the answer is JSON of a schema
    host_draw       Draws on the CPU: what sampler.draw computes
    logit_rules     What changes a row's logits before a token is chosen: penalties, logit bias
    logprobs        Log probabilities of tokens that are known: of those just chosen, and of a prompt's
    params          SamplingParams: how a request wants its tokens chosen
    rejection       The rejection rule of speculative sampling (Leviathan et al., arXiv 2211.17192, algorithm 1)
    sampler         Batched choice of the next token
    token_logprobs  Log probabilities at one position, and those of a whole prompt
    uniform         The random numbers of a request: hashes of (seed, position)
"""
