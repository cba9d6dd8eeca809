"""The number of nodes for a load, the bytes of its KV, and whether simulator and nodes agree.

Files:
    capacity         The highest load at which a cluster, simulated or live, keeps its objectives, by bisection
    check            Checks plans against the simulator, with random loads and objectives
    command          The smallest cluster for a load and its objectives, by formula: the number of prefill and decode
                     nodes, and its cost
    expert_failures  Copies of experts against failures of ranks: tokens per second of a node with one, two or more of
                     each expert
    kv_bytes         Bytes of KV by group, for published models or a Hugging Face directory: in the arena, in a
                     transfer, in the pool
    long_prompts     One long prompt on several nodes, by formula: time, bytes between nodes, and what short prompts
                     wait for
    roofline         When reuse and disaggregation pay, for a model on given hardware; and what this machine reaches
    validate         The simulator against real nodes: a step model is fitted to recorded steps, then both get the
                     same requests
    validate_sites   Two sites, live and simulated: the same requests over a real link and through the simulator's
                     sites
"""

PLANS = {
    "capacity": "lab.planning.capacity",
    "check-plan": "lab.planning.check",
    "expert-failures": "lab.planning.expert_failures",
    "kv-bytes": "lab.planning.kv_bytes",
    "long-prompts": "lab.planning.long_prompts",
    "plan": "lab.planning.command",
    "roofline": "lab.planning.roofline",
    "validate": "lab.planning.validate",
    "validate-sites": "lab.planning.validate_sites",
}
"""Name on the command line (scripts/plan.py, and scripts/tools.py among others) -> module whose main() runs it."""
