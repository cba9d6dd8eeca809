"""Loads a named model into memory: Hugging Face directories, GGUF, a cache of converted weights.

Files:
    byte_weights         A Hugging Face directory with matrices in bytes
    eagle_head           A head in the manner of EAGLE-3, in a Hugging Face directory of its own -> a part of a
                         ModelConfig
    eagle_weights        Reads the weights of a head that drafts (engine/checkpoint/eagle_head.py) from its
                         safetensors files
    fused_rows           Products in one tensor each: rows of q, k and v (Phi-3), and of gate and up (GLM-4 too), one
                         after the other
    hf_config            from_hf(): config.json of a Hugging Face directory -> ModelConfig
    hf_quantization      `quantization_config` of a Hugging Face checkpoint with matrices in 4 bits or in bytes
    joined_experts       gpt-oss' experts in floats: all of a layer in one tensor, matrices [in, out], columns of gate
                         and up in turns
    layered_weights      A model's weights, read from their files only when the model takes them
    loop_calls           Runs coroutines on an event loop for threads that wait for their results
    model_source         describe(): resolves the value of --model to local files, a ModelConfig and a fingerprint
    mxfp4_weights        A Hugging Face directory with matrices in MXFP4
    named_weights        Weights as tensors that a program put into the pool, each under a prefix and the name that
                         checkpoints have for it
    packed_weights       A Hugging Face directory with matrices in 4 bits
    pooled_weights       Weights as objects of the pooled store (--weights-from-store): a node without weights reads
                         them from its peers
    progress             Progress of loading weights: a bar on a terminal, at most ten lines in a log
    quantized_weights    load_quantized(): a model's weights with matrices in 4 to 8 bits
    row_order            Rows of checkpoints in our order, where it is another: of Qwen3-Next and GLM-4
    safetensors_weights  Tensors of a Hugging Face directory, one file or shards, under our names, mapped lazily
    weight_cache         Stores weights converted from a GGUF file, so that the next start only reads them
    weights              load(): a model's weights as tensors under our names, from safetensors, GGUF, or a seed
    families/            The keys of config.json that only some families have; hf_config.py reads the others
    gguf/                Models in one GGUF file
"""
