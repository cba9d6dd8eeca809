"""The parts of scripts/bench.py attention.

Files:
    cases         Ragged batches for the attention benchmark: where rows and blocks lie
    command       Attention kernels: GB/s of decode and TFLOP/s of chunked prefill beside the ceilings of the same run
                  and peers
    compiled      Attention kernels compiled without a GPU: what the benchmark's cases, or all tiles
    every_tile    Every row of the tile table with every type of KV
    grid          The reference grid: random steps that every attention backend must get right, on any device
    measured      Timing of attention on a GPU: ours, its peers, and the ceilings of the same run
    on_cpu        Timing of attention on the CPU: the cpu backend at each level of this CPU beside the torch backend
    peers         What ours is measured beside: torch's fused attention, FlexAttention and
    quantized     The reference grid over quantized pools (attention/codes.py), for backends that read codes
    side_by_side  One backend's times beside those of the built-in ones, on whatever device there is
    timing        Times by CUDA graph, and the ceilings of the GPU at hand
    tune          Finds the tiles of one row of attention/triton/tiles.py: compiles every candidate
    tuning        Candidates for a row of attention/triton/tiles.py: which are compiled without spills
"""
