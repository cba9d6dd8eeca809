"""One step: requests, blocks, rows and tensors.

Files:
    block_book     Which blocks of the pool each request holds
    block_table    A request's block ids as an array
    inputs         A step's rows as the model's tensors: one host buffer, filled by numpy
    journal        What a node notes of a request while it is there, for the request's timeline
    layer_reports  Layers of a step reported once the device has computed them
    request        Request and its transition log: what the engine knows of one generation
    rows           From what the batcher scheduled to what the runner computes
    runner         One step: rows of tokens in, chosen tokens out
    step           One step of the engine: which tokens of which requests it computes, and what it changed
"""
