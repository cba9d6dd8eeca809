"""Speculative decoding: how drafts are proposed and verified.

Files:
    draft         The draft model: a small model of the same vocabulary proposes tokens, and the target verifies them
                  in one step
    draft_source  Finds what drafts for the served model: another model with its vocabulary, its own further layer, or
                  a head
    layer_drafts  Drafts by a layer whose KV is a part of the target's blocks: multi-token prediction and EAGLE-3
    ngram         Prompt lookup: the draft is the text that followed the last earlier occurrence of the text's end
    speculative   Speculative decoding: the number of draft tokens per row, and which of them are accepted
    suffix        Suffix decoding: the draft is what mostly followed the text's end, here and in earlier answers
"""
