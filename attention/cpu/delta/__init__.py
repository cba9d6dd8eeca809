"""The gated delta rule over states in the pool: one token of each request, or many tokens of one.

Files:
    chunk.cpp  Many tokens of one request, in pieces of PIECE tokens
    delta.h    The common part of step.cpp and chunk.cpp: arguments, the state of a request in the pool, and rows of
               tokens
    step.cpp   One token of each request: the recurrence of attention/delta_rule.py, on the state where it lies
"""
