"""Compares the answers of our modules with those of upstream's released wheel (docs/connect.md has the differences).

Files:
    answers       Runs the cases of a module in processes of any interpreter, and collects their answers
    engine_cases  Calls of mooncake.engine with good, bad and missing arguments, in a process that has upstream's
                  module or ours
    record        Records what upstream's released wheel answers, as the reference of our conformance test
    store_cases   Calls of mooncake.store with good, bad and missing arguments, in a process that has upstream's
                  module or ours
    tensor_cases  Calls of mooncake.store for torch's tensors, in a process that has upstream's module or ours, and
                  torch
"""
