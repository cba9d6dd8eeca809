"""The two compiled passes of a placement: the shortlist, and the choice among a few nodes.

Files:
    cheapest.c  Finds the nodes that an acceptor asks before it places a request, in one pass over the columns of a
                view
    cheapest    Computes the shortlist of a view in one compiled pass: cheapest.c, compiled on first use into the
                user's cache
    choose.c    The choice of a prefill node and a decode node among a few, Algorithm 1 in plain loops
    choose      Computes the choice among a few nodes in two compiled passes: choose.c, compiled on first use into the
                user's cache
"""
