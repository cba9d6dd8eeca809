"""What a formula answers: plans, roofs, capacity by bisection.

Files:
    bisect  The largest load that is still good, by bisection
    loads   Loads for a plan: of a trace, with the prefixes that a pool of some size would find
    plan    How many nodes of each role a load needs, by formula
    roofs   When reuse beats computing anew and disaggregation beats colocation, by formula
"""
