"""The decoder: its shape from any configuration file, its operations on CPU and GPU, its parts on several ranks.

Files:
    decoder       One config-driven decoder for the Llama, Mistral, Qwen and Gemma families
    gpu           What this project asks of a device besides operations on tensors: streams, events
    graphs        CUDA graphs: a small step is one launch instead of some ten per layer
    huge_pages    Where packed weights lie: memory that a step streams through from end to end
    layers_cpu    All layers of a step in one C call
    model_config  The shape of a decoder, whatever file it was read from
    model_error   The one exception for everything that can be wrong with a model the user named
    moe           Mixture of experts: every token goes through its top k of E small MLPs, weighted by a router
    ops           The small operations between attention and the matrix products
    ops_choice    Which operations a model takes; on a CPU whose products: measured, never assumed
    ops_cpu       The operations of a model on a CPU: kernels of engine/model/cpu, called through ctypes
    ops_triton    The small operations of a model on a GPU: norms and gates are one kernel each
    parallel      Tensor parallelism: which part of a model is whose, and the collectives of a forward pass
    rope          The angles of rotary position embedding; attention/rotary.py applies them
    rope_scaling  Context extension of rotary position embedding: by what each frequency is divided
"""
