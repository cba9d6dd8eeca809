"""Which attention backend a node computes with.

Files:
    choose    Makes the backend of a node: a built-in one, the user's, or the fastest here
    measured  Chooses the attention backend for this CPU by a measurement with the model's heads
    quiet     Measurements at a start on a machine that may be busy
"""
