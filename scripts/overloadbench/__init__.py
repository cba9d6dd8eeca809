"""The parts of scripts/bench_overload.py."""
