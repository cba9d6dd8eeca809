"""Between text and token ids: tokenizers, chat templates, and output cut at stop strings."""
