"""Measures, simulates and breaks the system: benchmarks, ablations, the simulator, faults and tools.

Files:
    commands     Tables of commands: `scripts/bench.py NAME ...` runs the command of that name
    ablations/   Questions about the system, answered by the simulator or by real nodes
    bench/       Benchmarks: this project against a peer or a limit in the same run
    caches/      Hit rates of traces under cache policies: no node, no clock
    clients/     The runs of scripts/tools.py stock-clients: the tests of each stock client
    docs/        The generated parts of the documentation
    faults/      Faults under load: nodes that are killed, cut off, stopped or restarted
    formulas/    Questions answered by formulas: plans, roofs, capacity by bisection
    fuzz/        Fuzzing of all decoders of foreign data: mutate.py changes bytes
    gpu/         The parts of scripts/tools.py gpu-check
    launch/      A local cluster of node processes
    loads/       Request traces: read, changed, generated
    planning/    The number of nodes for a load, and whether simulator and nodes agree
    playground/  Your own kernel: checked, timed, served
    rdma_vm/     Real RDMA verbs without RDMA hardware: an emulated Debian kernel with Soft-RoCE
    simulator/   The cluster under virtual time: the classes of sched/ and cache/ that run in production
    tools/       Commands that are neither a benchmark nor a fault: checks, converters, formulas
    virtual/     Gossip cores on a virtual network, for tests and for the gossip benchmarks
"""
