"""A node's Prometheus metrics.

Files:
    events     Prometheus metrics of a node: vLLM's names where vLLM has the metric
    nic_use    How busy the network cards of this machine are, from the kernel's own counters
    table      The table of a node's own metrics: kind, name, help, labels, buckets
    transfers  Transfers per peer in the exposition format, read off the engine at each scrape
    watched    Metrics that somebody else counts anyway: read off their owner at each scrape
"""
