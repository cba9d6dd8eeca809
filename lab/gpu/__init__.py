"""The parts of scripts/tools.py gpu-check. They need only torch, triton and pytest, because a bare GPU machine may have
little more.

Files:
    attention          Judges the attention benchmark by its goals; scripts/bench.py attention measures
    checks             One line of the result: the measurement, its limit, and whether it is good enough
    command            All measurements that need a GPU, in one command on one GPU, in under ten minutes: measured,
                       limit, share, goal
    engine             Measures whole steps of Llama-3-8B's geometry, with random weights made on the GPU
    kernels            The kernel tests that CI runs interpreted, on the GPU: one pytest per file, all in parallel
    ranks              Tensor-parallel ranks: an arena whose heads are on two GPUs, and nodes with --tensor-parallel-
                       size 2
    sanitizer          Some of the kernel tests under compute-sanitizer's memcheck: no access outside allocated memory
    sections           Runs each section in a separate process
    serving            Serving with --device cuda: real nodes on the GPU answer like a node on the CPU
    staging            KV between GPU and page-locked host memory: layers of scattered blocks against one plain copy
                       of the same size
    tiles              The tiles of heads of 128: the shipped ones against the most promising others, a line for each
                       kernel
    transformers_peer  transformers' continuous batching on the same geometry, with its own random weights
"""
