"""Questions put to real nodes on this machine, or to a cluster that runs.

loads.py      requests, seeded: for the nodes and, the same ones, for the simulator
play.py       a cluster of pinned nodes, requests through it, figures as sim.result has them
shares.py     who had the cores
calibrate.py  what a step model is fitted to: recorded steps, the way in, the hand-over
case.py       what a live ablation is; run.py runs one
placement.py pool.py batching.py kv.py speculation.py      the ablations
"""

from __future__ import annotations
