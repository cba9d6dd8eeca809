"""The parts of scripts/bench_sched.py, one question each."""
