"""Models in one GGUF file.

Files:
    config   from_gguf(): metadata and tensor list of a GGUF file -> ModelConfig
    file     Header, metadata and tensor directory of a GGUF file, and its raw tensor bytes through a memory map
    weights  Tensors of a GGUF file under our names, dequantised, with q and k in Hugging Face's row order
"""
