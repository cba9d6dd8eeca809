"""Speculative decoding: who guesses, and which guesses hold."""
