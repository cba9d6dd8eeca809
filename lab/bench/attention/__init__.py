"""The parts of scripts/bench.py attention.

Files:
    cases         Ragged batches for the attention benchmark: the locations of rows and blocks
    command       Attention kernels: GB/s of decode and TFLOP/s of chunked prefill
    compiled      Attention kernels compiled without a GPU
    every_tile    Compiles every row of the tile table with every type of KV, without a GPU
    grid          The reference grid: random steps on which every attention backend must be correct
    measured      Timing of attention on a GPU: ours, its peers, and the ceilings of the same run
    on_cpu        Timing of attention on the CPU: the cpu backend at each level of this CPU against the torch backend
    peers         The peers in the measurement: torch's fused attention, FlexAttention and, if installed
    quantized     The reference grid over quantized pools (attention/codes.py), for backends that read codes
    side_by_side  Times of one backend and of the built-in ones, on any device
    timing        Times by CUDA graph, and the ceilings of this GPU
    tune          Finds the tiles of one row of attention/triton/tiles.py: compiles every candidate
    tuning        Candidates for a row of attention/triton/tiles.py: which compile without spills
"""
