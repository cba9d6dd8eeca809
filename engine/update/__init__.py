"""New weights for a running cluster: every node prepares them next to the old ones, then all switch.

Files:
    coordinator  Replaces the weights of a cluster in two phases, from the node that a client asked
    holder       WeightHolder: the engine of one node prepares new weights next to the old ones, and drops those that
                 nothing uses
    member       WeightsMember: the weights that one node serves
    messages     The messages between nodes about new weights: their kinds and bodies
    served       Which weights a cluster serves, and which of two statements about that is newer
"""
