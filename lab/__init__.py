"""Measures, simulates and breaks the system: benchmarks, ablations, the simulator, faults and tools.

Files:
    commands      Tables of commands: `scripts/bench.py NAME ...` runs the command of that name; without a name it
                  lists all of them
    flag_types    Numbers of the lab's command lines, as types for argparse: a value that cannot be is refused with
                  the flag's name
    one_line      Refusals on exactly one line of stderr, however narrow the terminal is and wherever stderr goes
    ablations/    Questions about the system, answered by the simulator or by real nodes
    bench/        Benchmarks: this project against a peer or a limit in the same run
    caches/       Hit rates of traces under cache policies: no node, no clock
    clients/      The runs of scripts/tools.py stock-clients: the tests of each stock client
    conformance/  Compares the answers of our modules with those of upstream's released wheel
    docs/         The generated parts of the documentation
    drafts/       A draft model that is cut out of a chat model and trained on text that the model itself writes
    faults/       Faults under load: nodes that are killed, cut off, stopped or restarted, and the checks afterwards
    foreign/      Programs of others, started as their documents say
    formulas/     Questions answered by formulas: plans, roofs, capacity by bisection
    fuzz/         Fuzzing of all decoders of foreign data: mutate.py changes bytes, targets.py lists the decoders
    geometry/     The KV and the weights of published models, as plans and the simulator see them
    gpu/          The parts of scripts/tools.py gpu-check
    launch/       A cluster of node processes, on this machine or on others
    loads/        Request traces: read, changed, generated
    mutants/      Wrong kernels on purpose: does every mistake of the list show in the quick checks?
    planning/     The number of nodes for a load, the bytes of its KV, and whether simulator and nodes agree
    playground/   Your own kernel: checked, timed, served
    rdma_vm/      Real RDMA verbs without RDMA hardware: an emulated Debian kernel with Soft-RoCE, on this machine's
                  own files
    simulator/    The cluster under virtual time: the classes of sched/ and cache/ over models of steps, networks and
                  disks
    tools/        Commands that are neither a benchmark nor a fault: checks, converters, formulas
    virtual/      Gossip cores on a virtual network, for tests and for the gossip benchmarks
"""
