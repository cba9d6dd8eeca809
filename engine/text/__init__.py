"""Between text and token ids: tokenizers, chat templates, and output cut at stop strings.

Files:
    chat_template   Messages -> prompt text, through the model's jinja2 template in a sandbox
    control_tokens  Control tokens that a client spells out in a chat stay text
    gguf_tokenizer  A `tokenizers` tokenizer rebuilt from the metadata of a GGUF file
    output          Output text: detokenised piece by piece, cut at stop strings
    spelt_json      JSON as templates and prompts have it, with blanks behind its commas and colons
    token_bytes     The bytes that each token stands for
    tokenizer       Text <-> token ids, chat messages -> token ids, and tokens -> text as they arrive
    tool_prompt     Tools for a model whose chat template knows none: told in the system message
"""
