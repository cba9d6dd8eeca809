"""The parts of scripts/tools.py gpu-check. They need torch, triton and pytest: a bare GPU machine may have little
more.

Files:
    attention          The attention benchmark with its goals: scripts/bench.py attention measures, this judges
    checks             One line of the result: what was measured, what limits it, and whether that is enough
    command            Everything that only a GPU can tell, in one command, on one GPU under ten minutes: measured
    engine             Whole steps of Llama-3-8B's geometry with random weights, made on the GPU
    kernels            The kernel tests that CI runs interpreted, on the GPU: one pytest per file, all at once
    ranks              Tensor-parallel ranks: an arena whose heads lie on two GPUs
    sanitizer          Part of the kernel tests under compute-sanitizer's memcheck
    sections           Running the sections, each in a process of its own: one that crashes
    serving            Serving with --device cuda: real nodes on the GPU answer as a node on the CPU does
    staging            KV between GPU and page-locked host memory
    transformers_peer  Transformers' continuous batching on the same geometry, with random weights of its own
"""
