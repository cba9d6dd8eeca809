"""Several sites, each a cluster with a pool of its own, and slow links between them.

Files:
    figures  Figures of a run with several sites
    rules    The sites of a run: their links, and what may cross them
    site     One site: its cluster, with prefixes that come from other sites
    sites    Several clusters under one clock, and the choice of the site of each request
"""
