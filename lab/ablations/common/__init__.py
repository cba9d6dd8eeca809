"""Shared by all ablations: cases, looks, tables, plots.

Files:
    ablation      An ablation: a question, simulated cases, the paper's values, and one sentence about the difference
    evidence      Which differences between cases a table shows: those that 95 % intervals over the seeds separate
    geometry      An ablation whose nodes run another model: its step times by formula, its KV in groups
    goals         Goals held against a measured value and its interval: met or missed by the whole interval, otherwise
                  open
    looks         Additional results of a run, computed from its requests: how long a shock lasts, how evenly work is
                  spread
    memory        KV memory of simulated nodes that keep a stated number of blocks, however many requests they run
    metrics       The metrics of ablations by name: each is read from a run's figures, or from those of a look
    own_policies  The user's policies in an ablation: one more case, its last one with them
    plot          An outcome as SVG or PNG: curves if cases have an x, otherwise bars, together with the paper's
                  values
    runs          Stores the figures of finished runs in a file, so that an interrupted ablation continues where it
                  stopped
    tables        An outcome as a Markdown section
"""
