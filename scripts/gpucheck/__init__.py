"""The parts of scripts/gpu_check.py. They need torch, triton and pytest: a bare GPU machine may have little more."""
