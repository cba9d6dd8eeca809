"""The generated parts of the documentation.

Files:
    command      Write docs/flags.md, docs/metrics.md, docs/errors.md
    figure_list  Every table of measured figures of docs/performance.md
    figures      Tables of README.md and docs/performance.md, made from the result files
    rooms        Writes the list of files in every `__init__.py` and docs/map.md from the first sentence of each file
    screenshots  Take the screenshots of the live page in docs/, over a cluster under load
    summary      README's table of ratios to others: its lines, and how each is read from a result
"""
