"""The cluster under virtual time: the classes of sched/ and cache/ that run in production, over models of steps,
networks and disks. Pure: the same seed gives the same bytes.

loop.py      the clock and its events
models.py    how long a step takes on some hardware, and what a block weighs
presets.py   models by name or from a file
steps.py     what the engine of a node recorded of its steps; fit.py makes a model of it
trace.py     requests: Mooncake's format, read and written
job.py       one request on its way, and what became of it
network.py   NICs whose flows share their bandwidth
caches.py    which blocks are where, exactly and as others were told
node.py      a prefill, decode or mixed node: its queue, its batch, its KV memory
contention.py nodes that share a machine
segment.py   decode steps between two changes of a batch
faults.py    crashes and slow nodes, from text or by seed; failures.py puts them to work
refusals.py  who is turned away under load
predictors.py  what a learned placement is told
plan.py      nodes of a load by formula
making.py    the parts of a cluster from its configuration
cluster.py   arrivals, placement on fresh or old views, transfers, the pool
result.py    figures of a run

Files:
    batch       The requests that decode on a node: promised ones, those whose KV waits for room
    cluster     Moves requests through a cluster: the classes of sched/ place them on a node's knowledge
    command     A trace through a simulated cluster: the classes of sched/ and cache/ that nodes run
    config      All parameters of a run except its requests; written into every result
    failures    Faults in a cluster: what is lost, which node notices when, and where lost requests go
    faults      Faults of a run, from text or by seed
    job         One request in the simulated cluster, and its result
    links       The acceptors' estimates of transfers: exact, learned from transfers
    making      The parts of a simulated cluster, made from its configuration
    node        A prefill, decode or mixed node: the queue of prompts, and the steps that it and the batch
    placing     The acceptors' knowledge of the nodes, and their placements
    predictors  The predictors for the guarded placement (sched/placement/learned.py)
    refusals    Which requests are refused: the variants of sched/rejection.py with the answers of the simulated nodes
    result      Figures of a run: latencies, hits, goodput; independent of the clock and the machine
    roles       Role changes in a simulated cluster: sched/role_change.py on the present state of the nodes
    segment     Decode steps that are not simulated one by one: between two changes of a batch
    models/     Models of steps, networks, disks and caches in virtual time
"""
