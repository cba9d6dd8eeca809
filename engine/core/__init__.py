"""Which requests compute how many tokens in the next step, and the loop that computes them.

Files:
    batcher        Token-budget batching: the requests of a node from their arrival to their end, and its steps one
                   after another
    cold_turns     When requests beyond memory take their turns on a node: one at a time, some layers per step, half
                   of the time
    costs          The cost models of this node's steps, fitted to the measured steps
    emissions      The results of a step, handed out to their requests in pieces that leave the event loop to others
    engine_load    The load of this node's engine, as gossip, load words and probes report it
    handed_out     Which steps have been handed out: who takes a request out of the batch waits for the tokens of its
                   last step
    held_weights   The weights that an engine has in memory, and which of them a request may use
    kv_ready       Decides which bytes of a prompt's KV may be sent to the decode node, and when
    kv_transfer    Moves one prompt's KV from the prefill node to the decode node while the prefill node computes the
                   rest
    layered_load   Loads a prefix layer by layer while the engine computes with it
    lost_experts   Requests whose experts were lost with a rank: they end, or keep their KV for themselves
    model_steps    Computes a step in the engine thread
    prefix_loads   Loads of prefixes from lower tiers and other nodes: which requests load one, and which loads a step
                   waits for
    priority       Lowers the priority of the model's threads, so that the event loop runs first if both need the same
                   core
    seats          Decides which requests of a node run and which wait
    served         The time of a prompt and of a token on this node beyond the model's own steps, learned from
                   requests
    step_planner   The rows of the next step: which requests compute how many tokens, under the token budget
    step_recorder  Records the work and the duration of every step as lines of a file
    worker         The engine loop of a prefill, decode or mixed node: schedule, compute in one thread, commit, repeat
"""
