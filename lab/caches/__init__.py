"""Hit rates of traces in cache policies: no node, no clock.

Files:
    belady       Belady's policy: evict what is needed again last
    command      Hit rates of every eviction and admission policy by capacity, on request traces
    replay       One trace through one cache: the eviction and admission classes of cache/
    targets      Block hit rates of the released traces that another program computed
    trace_stats  What a trace would give a cache: how reuse is distributed over requests and blocks
"""
