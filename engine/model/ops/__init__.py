"""The operations of a layer except attention: products, norms and gates, one class per kind of hardware.

Files:
    choice            Chooses the operations of a model; on a CPU it measures which matrix products are fastest
    cpu               The operations of a model on a CPU: kernels of engine/model/cpu, called through ctypes
    huge_pages        Memory for packed weights, which every step reads from start to end
    interface         The small operations between attention and the matrix products, one class per kind of hardware
    quantized         Matrices in 4 to 8 bits, with scales
    quantized_triton  Products with quantized weights on a GPU: codes stay in its memory, and the kernels make floats
                      of them in registers
    triton            The operations of a model on a GPU: norms, gates and quantized products are kernels, other
                      products torch's
"""
