"""The parts of scripts/bench.py overload.

Files:
    command  Twice the load that the cluster can serve, under each rejection variant: goodput, refusals, wasted
             prefill
    live     Overload of real nodes: one prefill and one decode node of the embedded model, one core each
"""
