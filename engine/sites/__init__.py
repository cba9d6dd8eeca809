"""Sites: which site computes a request, and prefixes that come from the pools of other sites.

Files:
    far_prefixes  Prefixes from the pools of other sites, at a price and within a budget
    finder        SiteFinder: the site of a request, as its acceptor chooses it
    members       The members of the cluster by site
"""
