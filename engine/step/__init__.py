"""One step: requests, blocks, rows and tensors.

Files:
    apart            A request that passes the model by itself, not as a row of the ragged batch, and a few layers at
                     a time
    arena_events     From changes of the arena to KV events
    block_book       Keeps track of the pool blocks that each request holds
    block_table      A request's block ids as an array, extended by the new ids instead of converted again every step
    cold             The blocks of a request whose KV exceeds the arena, and which of them lie where
    exchange         The KV that nodes with parts of one prompt's tokens send to one another, layer by layer
    hidden           Hidden states between the stages of a pipeline: what one stage computed, as bytes, and in the
                     order of tokens
    inputs           Converts a step's rows to the model's tensors: numpy fills one host buffer, and one copy moves it
                     to the device
    journal          Records a request's events on one node, for the request's timeline
    layer_blocks     One layer of some KV blocks as bytes on the CPU, out of the pool of any device and back into one
    layer_reports    Reports each layer of a step as soon as the device has computed it
    one_space        The arena and the DRAM tier as one pool: a table of blocks may name blocks of both
    part             The part of a long prompt that one node of a group computes: some of its layers, or some of its
                     tokens
    request          The state of one generation on one node
    rows             Converts the batcher's scheduled rows to the runner's rows
    runner           Runs one step: takes rows of tokens and returns sampled tokens
    split_attention  Attention of a row whose keys lie partly in a tier, or on other nodes
    state_tables     The states in requests' tables: which places have blocks, what is given back, and what is saved
                     for others
    step             One step of the engine: the tokens that it computes, and the changes that it made
"""
