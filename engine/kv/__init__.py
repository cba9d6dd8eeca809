"""KV between nodes: prompts pushed or pulled as they are computed, prefixes loaded from the pool, blocks published."""
