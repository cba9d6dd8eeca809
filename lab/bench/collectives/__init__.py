"""The parts of scripts/bench.py collectives.

Files:
    command       Measures the collectives of our process group of torch.distributed next to those of gloo, on one
                  host
    rank_program  One rank of scripts/bench.py collectives, as a program of others: it knows mooncake.pg and torch
"""
