"""Faults under load: nodes that are killed, cut off, stopped or restarted, and the checks afterwards.

Files:
    chaos            Gossip under random faults, many seeds: invariants after every event, agreement at the end
    checks           The checks after a fault: the same tokens, balanced books, no growth; and how long the streams
                     paused
    client           Clients that do not give up: they stream, and when their node is gone they continue at another
                     one by request id
    cut_nodes        Cut one node off the network under load, and heal: no client error, the same tokens, nothing held
                     afterwards
    cut_sites        Two sites over a link: what crosses it, what clients wait for, and the link cut under load and
                     healed
    exhaustion       Silent connections and a full or frozen SSD tier under load: no client error, the same tokens,
                     nothing held
    faulty_disk.c    A disk that fails or freezes, below LMDB and the slot file
    faulty_disk      A disk of a node that fails, is full or hangs on demand: `faulty_disk.c` below LMDB and the slot
                     file
    histories        Is a history of puts and gets of one key linearizable?
    kill_roles       SIGKILL one node of each role under load: no client error, the same tokens, and how long a stream
                     pauses
    migrations       Running requests move between decode nodes under load, by drains: no token is lost or doubled,
                     and how long it takes
    put_client       One client of scripts/faults.py put-histories in a separate process: it may be on the other side
                     of a cut
    put_histories    Clients put the same keys concurrently, in calm and across a cut: checks their reads against
                     docs/store.md
    rank_changes     Ranks with experts that are cut off, that join and leave, or that two nodes share: parts of
                     ranks.py
    ranks            Ranks with experts that are killed, stopped, cut off and continued under load: who notices, and
                     what it costs
    role_changes     Nodes that change between prefill and decode under a load that changes its nature: no request
                     fails, equal tokens
    rolling_restart  Restart every node of a local cluster in turn, under load, and count the requests that failed
    runner           The runner of fault scenarios: flags, clusters, the checks that follow every fault, the result,
                     the exit code
    stop_nodes       SIGSTOP one node under load for longer than every deadline of the others, SIGCONT, again: nothing
                     stays held
    tiny             A model that loads immediately, for benchmarks of everything except the model
    networks/        Networks of faults: nodes in namespaces, slow links between sites, cuts of connections, and
                     floods of new ones
    soak/            Nodes for a long time, under load and under faults
"""

FAULTS = {
    "chaos": "lab.faults.chaos",
    "churn": "lab.faults.soak.churn",
    "cut-nodes": "lab.faults.cut_nodes",
    "cut-sites": "lab.faults.cut_sites",
    "exhaustion": "lab.faults.exhaustion",
    "kill-roles": "lab.faults.kill_roles",
    "migrations": "lab.faults.migrations",
    "put-histories": "lab.faults.put_histories",
    "ranks": "lab.faults.ranks",
    "ranks-soak": "lab.faults.soak.busy_ranks",
    "role-changes": "lab.faults.role_changes",
    "rolling-restart": "lab.faults.rolling_restart",
    "soak": "lab.faults.soak.command",
    "stop-nodes": "lab.faults.stop_nodes",
}
"""Name on the command line (scripts/faults.py) -> module whose main() runs it."""
