"""Converts between text and token ids: tokenizers, chat templates, and output cut at stop strings.

Files:
    chat_template   Messages -> prompt text, through the model's jinja2 template in a sandbox
    control_tokens  Keeps control tokens in a client's chat messages as plain text: "<|im_start|>" in a message starts
                    no turn
    gguf_tokenizer  A `tokenizers` tokenizer rebuilt from the metadata of a GGUF file: byte-level BPE with the file's
                    pre-tokenizer
    output          Output text: detokenised incrementally, cut at stop strings
    spelt_json      JSON in the spelling of templates and prompts, with spaces after commas and colons
    token_bytes     The bytes of each token
    tokenizer       Text <-> token ids, chat messages -> token ids, and tokens -> text as they arrive
    tool_prompt     Tools for a model whose chat template has none: described in the system message, calls and results
                    as text
"""
