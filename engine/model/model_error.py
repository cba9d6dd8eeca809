"""The exception for every problem with a model that the user named."""


class ModelError(Exception):
    """A model, tokenizer or weights file that cannot be used. One line that names the remedy where there is one."""
