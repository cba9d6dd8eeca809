"""From logits to tokens: penalties, draws, and randomness that does not depend on the node of a request.

Files:
    grammar         Structured output: which tokens may follow, so that the answer is JSON of a schema, matches a
                    regex, or is a choice
    host_draw       Draws tokens on the CPU, without sorting the vocabulary
    logit_rules     Changes a row's logits before sampling: penalties, logit bias, minimum length, banned and allowed
                    tokens, grammar
    logprobs        Log probabilities of known tokens: of sampled tokens and of a prompt's
    params          SamplingParams: how a request samples its tokens
    race            Draws an index with a probability proportional to its weight, by a race of exponential random
                    numbers
    rejection       The rejection rule of speculative sampling (Leviathan et al., arXiv 2211.17192, algorithm 1), for
                    one position
    sampler         Samples the next tokens of a batch
    token_logprobs  Log probabilities at one position, and those of a whole prompt
    uniform         The random numbers of a request: hashes of
"""
