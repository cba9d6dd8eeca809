"""The decoder: its shape from any configuration file, its operations on CPU and GPU, its parts on several ranks.

Files:
    decoder         One config-driven decoder for the Llama, Mistral, Qwen, Gemma, DeepSeek and gpt-oss families
    delta           A layer with a gated delta rule instead of attention (arXiv 2412.06464): its past is a state
    delta_config    The part of a ModelConfig about layers with a state
    draft_layer     The input of the layer that drafts: multi-token prediction
    eagle           A head that drafts from inner layers of the model: EAGLE-3
    eagle_config    The part of a ModelConfig about a head that drafts
    gpu             The operations of a device beyond those on tensors: streams, events, page-locked memory, uploads
    graphs          CUDA graphs: a small step needs one launch instead of about ten per layer
    latent          Multi-head latent attention: all heads share one row per token
    latent_config   The part of a ModelConfig about latent attention
    latent_prompts  Prompts of latent attention with keys and values of heads: the unabsorbed form of
                    engine/model/latent.py
    layers          The layers of a decoder, made from weights: which products each one has, and which weights each
                    product fuses
    layers_cpu      All layers of a step in one C call
    model_config    The shape of a decoder, read from any kind of file
    model_error     The exception for every problem with a model that the user named
    parallel        Tensor parallelism: the part of a model on each rank, and the collectives of a forward pass
    rope            The angles of rotary position embedding; attention/rotary.py applies them
    rope_scaling    Context extension of rotary position embedding: the divisor of each frequency, and the scale of
                    the result
    cpu/            The operations of a model on CPUs in C++; engine/model/ops/cpu.py compiles and calls them
    experts/        Mixture of experts: the experts of a layer, and which of them a token passes through
    ops/            The operations of a layer except attention: products, norms and gates, one class per kind of
                    hardware
"""
