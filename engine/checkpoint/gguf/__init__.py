"""Models in one GGUF file.

Files:
    config   from_gguf(): metadata and tensor list of a GGUF file -> ModelConfig
    file     A GGUF file: its header (header.py), and the raw bytes of its tensors through a memory map
    header   Header of a GGUF file: its metadata and its tensor directory
    weights  Tensors of a GGUF file under our names, dequantised, with q and k in Hugging Face's row order
"""
