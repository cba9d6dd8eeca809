"""`python mooncake.py doctor`: what this machine offers a node, and what would make it better."""
