"""The generated parts of the documentation.

Files:
    command      Writes the generated pages of docs/, the tables of figures, and the list of files in every
                 `__init__.py`
    figure_list  Every table of measured figures of docs/performance.md
    figures      Tables of README.md and docs/performance.md, made from the result files: one table is one run of one
                 commit
    rooms        Writes the list of files in every `__init__.py` and docs/map.md from the first sentence of each file
    screenshots  Take the screenshots of the live page in docs/, over a cluster under load, in the machine's Chromium
    summary      README's table of ratios to others: its lines, and how each is read from a result
"""
