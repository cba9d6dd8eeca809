"""The one exception for everything that can be wrong with a model the user named."""


class ModelError(Exception):
    """A model, tokenizer or weights file that cannot be used. One line that names the remedy where there is one."""
