"""Transfers from and to memory of a GPU.

Files:
    memory   Memory of a device that the CPU cannot address: the interface for transfers, and how spans are split for
             its buffers
    peers    Regions of peers in device memory: their node performs the opposite operation; our WRITE is a READ into
             its device
    staging  Device memory in transfers: spans of a GPU's arena pass through page-locked host buffers
"""
