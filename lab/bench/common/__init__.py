"""Shared by all benchmark scripts: results, workloads, an OpenAI client, latency definitions.

Needs nothing of the serving packages, so the scripts also measure other servers.

Files:
    client       An OpenAI streaming client that records the time of every event
    cores        How much more two processes compute at once than one: cores that share units, memory or background
                 work give less
    datasets     Converts flags to a workload: the datasets of the serving benchmarks, named as in `vllm bench serve`
    latency      Latency, throughput and goodput from outcomes, defined as `vllm bench serve` defines them
    machine      The machine of a benchmark: its CPU features, and whether it was idle
    others       The share of the cores that others used since a moment: processes that this one did not start, and
                 the hypervisor
    peer_python  --peer-python: the interpreters that peers are installed in, each in its own environment
    portable     Makes result files portable: paths of this machine are cut to their last part
    rank         Percentiles by rank: one definition for every benchmark that times calls
    results      The one result format of all benchmarks, as JSON and as a table with ratios
    serve_flags  The flags of scripts/bench.py serve: servers, requests, report
    timing       Seconds of calls: one after the other, or of contenders in turns
    trace        Rows of a trace as requests of a benchmark
    workload     The requests of a benchmark: prompts as token ids, output lengths, arrival times
"""
