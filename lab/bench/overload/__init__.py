"""The parts of scripts/bench.py overload.

Files:
    command  Twice what the cluster can take, under each rejection variant: goodput, refusals
    live     Overload of real nodes: one prefill and one decode node of the embedded model, a core each
"""
