"""What every ablation has: cases, looks, tables, plots.

Files:
    ablation  What an ablation is: a question, simulated cases, what the paper says
    looks     What a run shows besides its totals, from its requests: how long a shock is felt
    plot      An outcome as SVG or PNG: curves where cases have an x, else bars, the paper's values beside
    runs      Figures of runs that have been made, in a file: what was stopped goes on where it was
    tables    An outcome as a Markdown section
"""
