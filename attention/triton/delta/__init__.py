"""The gated delta rule over states in the pool, in Triton.

Files:
    chunk   Many tokens of one request, in pieces of PIECE tokens
    places  Where the elements of a state lie in the pool, and the rows of tokens that both kernels read
    rule    The gated delta rule of the Triton backend: one launch for the decodes of a layer, one for each chunk
    step    One token of each request: the recurrence of attention/delta_rule.py, on the state where it lies
"""
