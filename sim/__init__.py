"""The cluster under virtual time: the very classes of sched/ and cache/ that run in production, over models of steps,
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
"""
