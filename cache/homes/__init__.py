"""Which node keeps a key, which home is asked next, and which of two contents stays. Pure.

Files:
    agreement   Which of two contents of one key stays: every replica says the same without asking anybody
    deciding    DecidingWalk: the way of a put whose keys do not name their content
    heat        Which blocks a home is asked for so often that others should have them too, and until when
    pace        How fast each home answers, as this node has seen it
    rendezvous  Homes of a block: weighted rendezvous hashing
    repair      Who owes whom a copy, after members came or went
    routing     Router: which home to ask next for a block, and which to write it to
"""
