"""Questions answered by formulas: plans, roofs, capacity by bisection.

Files:
    bisect           The largest load that meets a condition, by bisection
    expert_failures  Goodput of a node whose ranks fail, with and without copies of its experts, by formula
    loads            Loads for a plan: from a trace, with the prefixes that a pool of a given size would find, or from
                     distributions
    long_prompts     One long prompt on several nodes, by formula: tensor, context and pipeline parallel
    plan             The number of nodes of each role for a load, by formula
    roofs            When reuse is faster than computing and disaggregation faster than colocation, by formula
"""
