"""The gated delta rule over states in the pool: one token of each request, or many tokens of one.

Files:
    chunk.cpp  Many tokens of one request, in pieces of PIECE tokens: the chunkwise form of the gated delta rule with
               its WY
    delta.h    The gated delta rule
    step.cpp   One token of each request: the recurrence of attention/delta_rule.py, on the state where it lies
"""
