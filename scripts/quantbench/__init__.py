"""The model behind prefixes that went through the pool in another type."""
