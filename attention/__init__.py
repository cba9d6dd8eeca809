"""How attention is computed: one ragged-batch interface, several backends.

Files:
    codes           KV with one byte per element: conversion between values and codes, and the layout of codes and
                    scales in the arena
    declared        Capabilities that a backend declares as attributes of its class, beyond what every backend must do
    delta_rule      The gated delta rule: linear attention whose past is one matrix per head
    delta_states    The gated delta rule over states in a paged pool: who computes it, and what every implementation
                    is given
    interface       The attention backend protocol and the ragged batch it works on
    latent          Attention over latent rows: one row per token for all heads, whose first part is also the value
    nibbles_torch   KV blocks in four bits per element on a CPU, for the pool
    parts           Attention over a context in parts that need not be in memory together, merged by their log-sum-exp
    quantize_torch  KV blocks in one byte per element on a CPU, or in four bits
    reference       The definition of attention: every other backend is tested against this one
    rotary          Rotary position embedding, half-split: element i of a head is rotated with element i + head_size /
                    2
    states          States of requests in the blocks of a paged pool: which blocks a step reads and writes, and where
                    a layer's part is
    torch_backend   The backend for every device of torch: gathers blocks, then calls torch's fused attention
    choice/         Which attention backend a node computes with
    cpu/            Attention on CPUs in C++, on the paged pool itself: no gather, no copy of the context
    triton/         Attention kernels in Triton for NVIDIA GPUs
"""

from __future__ import annotations

backends: dict[str, str] = {
    "cpu": "attention.cpu.backend:CpuBackend",
    "reference": "attention.reference:ReferenceBackend",
    "torch": "attention.torch_backend:TorchBackend",
    "triton": "attention.triton.backend:TritonBackend",
}
"""The registry: name for --attention-backend -> MODULE:CLASS. attention/choice/choose.py imports the module of the
chosen one, so this file needs no torch, and flags take their choices from it."""
