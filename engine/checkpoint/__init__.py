"""From the model a user named to weights in memory: Hugging Face directories, GGUF, a cache of the converted."""
