"""The gated delta rule over states in the pool, in Triton.

Files:
    chunk   Many tokens of one request, in pieces of PIECE tokens
    places  Where the elements of a state lie in the pool, and the rows of tokens that both kernels read
    rule    The rule of the Triton backend: one launch for the decodes of a layer, one for each chunk
    step    One token of each request: the recurrence, on the state where it lies
"""
