"""Transfers from and to memory of a GPU.

Files:
    memory   Memory of a device that the CPU cannot address: what transfers ask of it
    peers    Regions of peers that are on a device: their node is asked to do the opposite
    staging  Device memory in transfers: spans of a GPU's arena travel through page-locked host buffers where the
             network card cannot reach the GPU itself
"""
