"""Experiments on request traces: no node, no clock.

Files:
    commands     Tables of commands: `scripts/bench.py NAME ...` runs the command of that name
    ablations/   Questions about the system, answered by the simulator or by real nodes
    bench/       Benchmarks: ours next to a peer or a limit in the same run
    caches/      Hit rates of traces in cache policies: no node, no clock
    clients/     The runs of scripts/tools.py stock-clients: what each stock client is asked to do
    docs/        The generated parts of the documentation
    faults/      Faults under load: nodes that are killed, cut off, stopped, restarted
    formulas/    What a formula answers: plans, roofs, capacity by bisection
    fuzz/        Fuzzing of everything that decodes what others wrote: mutate.py changes bytes
    gpu/         The parts of scripts/tools.py gpu-check
    launch/      A local cluster of node processes
    loads/       Request traces: read, changed, generated
    planning/    How many nodes a load needs, and whether simulator and nodes agree
    playground/  A kernel of your own: checked, timed, served
    rdma_vm/     Real RDMA verbs without RDMA hardware: a Debian kernel with Soft-RoCE, emulated
    simulator/   The cluster under virtual time: the very classes of sched/ and cache/ that run in production
    tools/       Commands that are neither a benchmark nor a fault: checks, converters, formulas
    virtual/     Gossip cores on a virtual network, for tests and for the gossip benchmarks
"""
