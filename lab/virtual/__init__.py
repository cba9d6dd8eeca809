"""Gossip cores on a virtual network, for tests and for the gossip benchmarks.

Files:
    cluster  A cluster of gossip cores on a virtual network: real protocol code, real packets, no real time
    network  A network of sans-IO cores in virtual time, with every fault a real one has; all of it follows from the
             seed
"""
