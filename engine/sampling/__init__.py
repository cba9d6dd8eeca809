"""From logits to tokens: penalties, draws, and randomness that does not depend on the node of a request.

Files:
    grammar         Structured output: which tokens may follow, so that the answer is JSON of a schema
    host_draw       Draws on the CPU: the same results as sampler.draw
    logit_rules     Changes a row's logits before sampling: penalties, logit bias, minimum length
    logprobs        Log probabilities of known tokens: of sampled tokens and of a prompt's
    params          SamplingParams: how a request samples its tokens
    race            Draws an index with a probability proportional to its weight
    rejection       The rejection rule of speculative sampling (Leviathan et al., arXiv 2211.17192, algorithm 1)
    sampler         Samples the next tokens of a batch
    token_logprobs  Log probabilities at one position, and those of a whole prompt
    uniform         The random numbers of a request: hashes of (seed, position)
"""
