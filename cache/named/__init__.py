"""Values and tensors under names of any length, as programs put them and nodes read them.

Files:
    names          Names of any length in the pool: the keys of named values and the head that keeps the name with the
                   value
    tensor_format  The bytes of a tensor in the pool, as upstream writes them: a head of HEAD_BYTES, then the elements
                   in C order
    tensors        NamedTensors: finds and reads the tensors that programs put into the pool under names
"""
