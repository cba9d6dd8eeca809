"""The gated delta rule over states in the pool: one token of each request, or many tokens of one.

Files:
    chunk.cpp  Many tokens of one request, in pieces of PIECE tokens
    delta.h    What step.cpp and chunk.cpp share: their arguments, the state of a request in the pool, and rows of
               tokens
    step.cpp   One token of each request: the recurrence of attention/delta_rule.py, on the state where it lies
"""
