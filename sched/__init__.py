"""Who does what: pure decisions, no clock, no sockets, no torch."""
