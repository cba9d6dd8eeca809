"""Sites: which site a request goes to, how far the sites are, and which fetches between them save time.

Files:
    choice     The site of a request: queue + (transfer or recompute) + distance, for each site
    distances  Round trips from one node to other sites
"""
