"""What one node computes: requests, batching, the model, and the loops of the roles."""

__version__ = "0.1.0"
