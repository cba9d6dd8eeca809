"""Fuzzing of everything that decodes what others wrote: mutate.py changes bytes, targets.py are the decoders."""
