"""Faults under load: nodes that are killed, cut off, stopped or restarted, and the checks afterwards.

Files:
    chaos               Gossip under random faults, many seeds: invariants after every event, agreement at the end
    checks              What must hold after a fault: the same tokens, balanced books, no growth
    client              Clients that do not give up: they stream
    cut_nodes           Cut one node off the network under load, and heal: no client error, the same tokens
    exhaustion          Silent connections and a full or frozen SSD tier under load: no client error
    faulty_disk.c       A disk that fails or stands still, below LMDB and the slot file: LD_PRELOAD this
    faulty_disk         A disk of a node that fails, is full or hangs on demand
    histories           Is a history of puts and gets of one key linearizable?
    kill_roles          SIGKILL one node of each role under load: no client error, the same tokens
    namespaces          Nodes in separate network namespaces, connected by a bridge: during a cut
    put_client          One client of scripts/faults.py put-histories in a separate process
    put_histories       Clients put the same keys concurrently, in calm and across a cut
    role_changes        Nodes that change between prefill and decode under a load that changes its nature
    rolling_restart     Restart every node of a local cluster in turn, under load
    runner              The runner of fault scenarios: flags, clusters, the checks that follow every fault
    silent_connections  A flood of TCP connections that never finish what they begin
    soak                The store under load and under faults, for a given time
    soak_holders        A client's view while a holder of its values is killed (SIGKILL) or hangs (SIGSTOP)
    soak_load           Mixed load on three store nodes: values, objects, removals, and a client that reconnects
    soak_tier           An SSD tier that writes in a separate process until it is killed; and faults for it: SIGKILL
    stop_nodes          SIGSTOP one node under load for longer than every deadline of the others, SIGCONT, again
    tiny                A model that loads immediately, for benchmarks of everything except the model
"""

FAULTS = {
    "chaos": "lab.faults.chaos",
    "cut-nodes": "lab.faults.cut_nodes",
    "exhaustion": "lab.faults.exhaustion",
    "kill-roles": "lab.faults.kill_roles",
    "put-histories": "lab.faults.put_histories",
    "role-changes": "lab.faults.role_changes",
    "rolling-restart": "lab.faults.rolling_restart",
    "soak": "lab.faults.soak",
    "stop-nodes": "lab.faults.stop_nodes",
}
"""Name on the command line (scripts/faults.py) -> module whose main() runs it."""
