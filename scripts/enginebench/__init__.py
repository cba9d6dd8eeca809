"""The parts of scripts/bench_engine.py."""
