"""The parts of scripts/bench.py experts.

Files:
    command       Measures dispatch and combine between ranks with experts, next to gloo's all_to_all and memcpy
    rank_program  One rank of scripts/bench.py experts: it answers every message at once
"""
