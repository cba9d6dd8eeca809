"""Parts of scripts/bench_transfer.py: contenders in pairs of processes over the same two arenas."""
