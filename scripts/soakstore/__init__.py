"""The parts of scripts/soak_store.py that start nodes."""
