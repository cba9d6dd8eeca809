"""Shared by all benchmark scripts: results, workloads, an OpenAI client, latency definitions.

Needs nothing of the serving packages, so the scripts also measure other servers.

Files:
    client       An OpenAI streaming client that keeps the time of every event
    datasets     From flags to a workload: the datasets of the serving benchmarks
    latency      Latency, throughput and goodput from outcomes, defined as `vllm bench serve` defines them
    machine      The machine that a benchmark ran on: what its CPU can do, and whether it was quiet
    peer_python  --peer-python: the interpreters that peers are installed in
    portable     Result files are read on other machines: of the paths of this one they keep the last part
    results      The one result format of all benchmarks, as JSON and as a table with ratios
    serve_flags  The flags of bench_serve.py: which servers, what to send, what to report
    timing       Seconds of calls, one after the other
    trace        Rows of a trace as requests of a benchmark
    workload     What a benchmark sends and when: prompts as token ids, output lengths, arrival times
"""
