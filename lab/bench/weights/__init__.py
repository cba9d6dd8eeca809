"""The parts of scripts/bench.py weights.

Files:
    command          New weights for a running cluster: how long preparing takes, what streams notice, and how long
                     the switch is
    trainer_program  A trainer: puts the tensors of a safetensors file into the pool through mooncake.store, all that
                     it has of ours
"""
