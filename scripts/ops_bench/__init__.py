"""The parts of scripts/bench_ops.py."""
