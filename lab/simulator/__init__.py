"""The cluster under virtual time: the classes of sched/ and cache/ over models of steps, networks and disks. These
classes run in production. Pure: the same seed gives the same bytes.

Files:
    acceptors       The policies of the acceptors: one for all, or one for each acceptor if the policy learns
    batch           The requests that hold KV on a node: prompts that it computes, running ones, and those whose KV
                    waits for room
    cluster         Moves requests through a cluster: places, queues, computes, hands over and decodes them
    command         A trace through a simulated cluster: the classes of sched/ and cache/ that nodes run, under
                    virtual time
    config          All parameters of a run except its requests; written into every result
    failures        Faults in a cluster: which parts are lost, which node notices when, and where lost requests go
    faults          Faults of a run, from text or by seed
    geometry_flags  The flags of commands without SimConfig that choose a step model by formula: a published model on
                    given hardware
    job             One request in the simulated cluster, and its result
    lengths         The knowledge of a simulated cluster about the length of an answer before its end
    links           The acceptors' estimates of transfers: exact, learned from transfers, or learned and reported by
                    the rails
    making          The parts of a simulated cluster, made from its configuration
    migration       Running requests that move between decode nodes: the rules of sched/migration.py on the present
                    state of the nodes
    node            A prefill, decode or mixed node: the queue of prompts, and the steps that it and the batch
                    (batch.py) take
    placing         The acceptors' knowledge of the nodes, and their placement of requests: the classes of sched/
                    under virtual time
    predictors      The predictors for the guarded placement
    refusals        Which requests are refused: the variants of sched/rejection.py with the answers of the simulated
                    nodes
    result          Figures of a run: latencies, hits, goodput; independent of the clock and the machine
    roles           Role changes in a simulated cluster: sched/role_change.py on the present state of the nodes
    scaling         Nodes that start and leave with the load: sched/scaling/ on the present state of the nodes
    arena/          The KV arena of a simulated node: what requests hold and what later prompts may find share one
                    memory
    fabric/         The network of a cluster as a fat tree: hosts, racks and pods, with links that may be
                    oversubscribed
    models/         Models of steps, networks, disks and caches in virtual time
    rivals/         Rivals that need a mechanism which nodes do not have, so that only the simulator has them
    sessions/       Sessions of a simulated cluster
    sites/          Several sites, each a cluster with a pool of its own, and slow links between them
"""
