"""Shared by all ablations: cases, looks, tables, plots.

Files:
    ablation  An ablation: a question, simulated cases, the paper's values
    looks     Additional results of a run, computed from its requests: how long a shock lasts
    metrics   The metrics of ablations by name: each is read from a run's figures, or from those of a look
    plot      An outcome as SVG or PNG: curves if cases have an x, otherwise bars
    runs      Stores the figures of finished runs in a file
    tables    An outcome as a Markdown section
"""
