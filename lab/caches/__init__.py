"""Hit rates of traces under cache policies: no node, no clock.

Files:
    belady   Belady's policy: evicts the content that is needed last
    command  Hit rates of every eviction and admission policy by capacity, on request traces, with the classes that
             nodes run
    replay   Replays one trace through one cache that is cold at the start
    targets  Block hit rates of the released traces, computed by another program
"""
