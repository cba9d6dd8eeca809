"""A draft model that is cut out of a chat model and trained on text that the model itself writes.

Files:
    command  Cuts a small draft model out of the embedded model, and trains it on text that the model itself writes
    cut      Makes the draft model of a recipe, once per machine: it is kept in $XDG_CACHE_HOME/mooncake/drafts
    distill  Cuts a draft model out of a Llama and trains it to say what the whole model says
    llama    A Llama's forward pass over padded sequences, with gradients: plain torch, for training a draft
    runner   A model on the CPU with room for KV, as a node runs it, but without a node
    texts    Conversations that a chat model writes itself: it continues the head of a user's turn, then answers
"""
