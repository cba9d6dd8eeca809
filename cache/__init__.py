"""What KV is kept, where, and for how long."""
