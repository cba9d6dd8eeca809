"""The parts of scripts/bench.py attention.

Files:
    cases               Ragged batches for the attention benchmark: the locations of rows and blocks, and their
                        minimum cost
    command             Measures attention kernels: GB/s of decode and TFLOP/s of chunked prefill, compared with
                        limits and peers
    compiled            Attention kernels compiled without a GPU: the resources of a multiprocessor that they need
    cost                A cost model of a compiled attention kernel: the cycles that one turn of its main loop takes
                        on a multiprocessor
    delta_grid          The reference grid of the gated delta rule: random steps over states in a pool, on which every
                        rule must be correct
    every_tile          Compiles every row of the tile table with every type of KV, without a GPU, for the GPUs of the
                        row
    grid                The reference grid: random steps on which every attention backend must be correct, on any
                        device
    measured            Timing of attention on a GPU: ours, its peers, and the ceilings of the same run
    on_cpu              Timing of attention on the CPU: the cpu backend at each level of this CPU against the torch
                        backend, in the same run
    peers               The peers in the measurement: torch's fused attention, FlexAttention and, if installed,
                        FlashInfer
    quantized           The reference grid over quantized pools (attention/codes.py), for backends that read codes
    quantized_products  Kernels of products with quantized weights, compiled without a GPU: the launches for every
                        type of weight
    sass                The main loops of a compiled kernel, counted in the machine's own instructions
    side_by_side        Times of one backend and of the built-in ones, on any device
    timing              Times by CUDA graph, and the ceilings of this GPU
    tune                Finds the tiles of one row of attention/triton/tiles.py: compiles every candidate, and times
                        on a GPU those that fit
    tuning              Candidates for a row of attention/triton/tiles.py: which compile without spills, and which is
                        fastest on a GPU
"""
