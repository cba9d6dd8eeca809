"""Transfers from and to memory of a GPU.

Files:
    memory   Memory of a device that the CPU cannot address: the interface for transfers
    peers    Regions of peers in device memory: their node performs the opposite operation
    staging  Device memory in transfers: spans of a GPU's arena pass through page-locked host buffers if the network
             card cannot access the GPU directly
"""
