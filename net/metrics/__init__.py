"""A node's Prometheus metrics.

Files:
    events     Prometheus metrics of a node: vLLM's names if vLLM has the metric, `mooncake:` for the others
    nic_use    How busy the network cards of this machine are, from the kernel's counters
    table      The table of a node's own metrics: kind, name, help, labels, buckets
    transfers  Transfers per peer in the exposition format, read from the engine at each scrape, without cost for
               submissions
    watched    Metrics that another part already counts: read from their owner at each scrape, without cost between
               scrapes
"""
