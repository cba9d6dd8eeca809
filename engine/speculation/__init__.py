"""Speculative decoding: who guesses, and which guesses hold.

Files:
    draft         The draft model: a small model of the same vocabulary guesses the next tokens
    draft_source  Which model guesses tokens for the model served, and whether the two understand each other
    ngram         Prompt lookup: the draft is what followed the last time that the end of the text occurred before
    speculative   Speculative decoding: which rows of a step get how many draft tokens
"""
