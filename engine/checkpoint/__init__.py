"""From the model a user named to weights in memory: Hugging Face directories, GGUF, a cache of the converted.

Files:
    gguf_config          From_gguf(): metadata and tensor list of a GGUF file -> ModelConfig
    gguf_file            Header, metadata and tensor directory of a GGUF file
    gguf_weights         Tensors of a GGUF file under our names, dequantised
    hf_config            From_hf(): config.json of a Hugging Face directory -> ModelConfig
    loop_calls           Coroutines of an event loop for threads that have to wait for their results
    model_source         Describe(): from what the user wrote behind --model to files on this disk
    pooled_weights       Weights as objects of the pooled store (--weights-from-store)
    progress             Progress of loading weights: a bar on a terminal, ten lines at most in a log
    safetensors_weights  Tensors of a Hugging Face directory, one file or shards, under our names, mapped lazily
    weight_cache         Weights as they were converted from a GGUF file, kept so that the next start only reads them
    weights              Load(): a model's weights as tensors under our names, from safetensors, GGUF, or a seed
"""
