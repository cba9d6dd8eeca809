"""The parts of scripts/kill_roles.py."""
