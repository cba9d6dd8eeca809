"""The acceptor's side of a request: placed, followed, tried again.

Files:
    acceptor          The acceptor: the node that took a client's request owns it until the last token
    adoption          Taking over a request whose acceptor was lost: its client has come back to this node
    attempts          The attempts of accepted requests: where each runs, what its nodes tell of it
    bursts            Asking whether a prompt's new blocks are being computed somewhere already
    cheapest.c        Whom an acceptor asks before it places a request
    cheapest          A shortlist of a view in one compiled pass: cheapest.c
    claims            Announces a prompt's work to its prefill node before the prompt arrives there
    clocks            Estimates the clock offsets of other nodes from calls and their answers
    cluster           What a node reaches the others by
    declined          A decision against a request: what its client is told, and what led there
    demands           What a request needs of its nodes, for placement
    flight            One accepted request: its state so far, and its output as text
    flight_log        What is noted of requests on their way: their timelines, kept for a while after they end
    known             The nodes that this acceptor knows, as a view for placement
    persistence       Decides whether and when to retry a request
    placed            A placement with its inputs: the answers of the asked nodes, and the time of the decision
    placement_policy  The policy that --placement names
    placing           From a request to a placement: make a shortlist, ask its nodes, look up the prefix
    probing           Asks nodes for their load before the policy chooses one
    silence           Handles nodes that fall silent
"""
