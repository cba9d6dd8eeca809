"""Blocks that cross from one site to another: a budget for the link, copies by the rules of a CDN, the pools of others.

Files:
    budget       LinkBudget: a budget of bytes for one link between sites in one direction: a token bucket
    copies       Which blocks of other sites are copied to this one, and for how long the copies stay: the rules of a
                 CDN
    other_sites  The pools of other sites, as one node reads them
"""
