"""Decides which node keeps a key, which home is asked next, and which of two contents stays. Pure.

Files:
    agreement   Decides which of two contents of one key stays
    deciding    DecidingWalk: the steps of a put whose keys do not identify their content, so that the homes have to
                agree
    heat        Finds blocks that are read so often that they need more replicas, and for how long
    pace        The measured speed of each home, and how long to wait for a late one
    rendezvous  Homes of a block by weighted rendezvous hashing
    repair      Which node must offer a copy to which, after membership changes and after homes refused their blocks
    routing     Router: chooses the next home to ask for a block, and the homes to write it to
"""
