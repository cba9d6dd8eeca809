"""Who does what: pure decisions, no clock, no sockets, no torch.

Files:
    admission    Who is turned away, and when to come back
    batching     Batching policies: how many prefill tokens a step may have in addition to its decodes
    classes      Service classes: what each promises, and its share when they compete
    cost         How long a prefill, a decode step or a transfer takes
    queueing     Who is prefilled next: orders of the queue of prompts
    rejection    Who is turned away under load: the variants of the paper
    role_change  Decides when a node that can prefill and decode, and does one of them, switches to the other
    step_cost    Time of a step that decodes and prefills at once
    gossip/      What nodes tell each other of their load and of what they hold
    membership/  Who is in the cluster: SWIM with Lifeguard
    placement/   Where a request is prefilled and decoded: Algorithm 1 of the Mooncake paper and its rivals
"""
