"""The decoder: its shape from any configuration file, its operations on CPU and GPU, its parts on several ranks."""
