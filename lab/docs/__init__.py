"""The generated parts of the documentation.

Files:
    clients      The tables of docs/clients.md: which client ran what against a cluster, and the result
    command      Writes the generated pages of docs/, the tables of figures, and the list of files in every
                 `__init__.py`
    figure_list  Every table of measured figures of docs/performance.md
    figures      Tables of README.md and docs/, made from the result files: one table is one run of one commit
    refusals     The error messages in the source: those that the API answers, and those that end a command with exit
                 code 2
    rooms        Writes the list of files in every `__init__.py` and docs/map.md from the first sentence of each file
    screenshots  Take the screenshots of the live page in docs/, over a cluster under load, in the machine's Chromium
    summary      README's table of ratios to others: its lines, and how each is read from a result
"""
