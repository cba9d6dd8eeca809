"""The acceptor's side of a request: placed, followed, tried again.

Files:
    acceptor          The acceptor: the node that took a client's request owns it until the last token
    adoption          Takes over a request of a lost acceptor when its client reconnects to this node
    attempts          Attempts of accepted requests: starts each on its nodes, receives their updates, and ends it on
                      all of them
    beyond            Places requests whose KV exceeds the arenas of the cluster, on a node that takes them
    clocks            Estimates the clock offsets of other nodes from calls and their answers
    cluster           The connections through which a node reaches the others
    declined          A decision against a request: what its client is told, and what led there, kept to be explained
                      like a placement
    demands           The demands of a request on its nodes, for placement: from the request and the part of its
                      prompt that was found
    flight            One accepted request: its state so far, and its output as text
    flight_log        Records the timelines and metrics of accepted requests
    gate              Refuses requests on the acceptor while the requests without a first token would fill the queues
                      of the nodes
    groups            Groups of prefill nodes for long prompts (--prefill-parallel): formed for each request, from
                      gossip and load
    known             The nodes that this acceptor knows, as a view for placement
    moving            Where a running request is while it moves between decode nodes, as its acceptor sees it
    persistence       Decides whether and when to retry a request
    placed            A placement with its inputs: the answers of the asked nodes, and the time of the decision
    placement_policy  The policy that --placement names
    placing           From a request to a placement: make a shortlist, ask its nodes, look up the prefix, let the
                      policy decide
    probing           Asks nodes for their load before the policy chooses one
    silence           Handles nodes that fall silent
    claiming/         Announcements of the acceptor before a prompt arrives at its node: its work, and the blocks that
                      it will compute
    compiled/         The two compiled passes of a placement: the shortlist, and the choice among a few nodes
    sessions/         Sessions that an acceptor answers
"""
