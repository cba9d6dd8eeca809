"""The exception for every problem with a model that the user named."""


class ModelError(Exception):
    """A model, tokenizer or weights file cannot be used. The message is one line and names the remedy, if any."""
