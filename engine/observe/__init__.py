"""Reports on requests and nodes: timelines, explain, top, OpenTelemetry.

Files:
    activities       The activities in the timeline of a request: what each of its nodes did and when, on one clock
    estimate_errors  The errors of the estimates of the last minutes, of one node or of several
    explain          `python mooncake.py explain [REQUEST-ID] --url http://HOST:PORT`: explains a request's placement,
                     as a table
    history          The work of one node in the last 15 minutes, in intervals of a few seconds: for the charts of the
                     live page
    intervals        Intervals of activities, and the time that two activities share
    line_file        A file to which a serving node appends lines
    live             The data of the live page and of `mooncake.py top`: the reports and histories of all nodes
    logs             Log lines on stderr: as text, or one JSON object per line
    merged           The history of a cluster: the intervals of its nodes (engine/observe/history.py) added up
    moved            Bytes that moved between a node and its peers during each interval, by rail, and new failures
    node_client      The client of the commands `top`, `drain` and `explain`: URL, key, errors in one line
    otlp             Sends finished requests to an OpenTelemetry collector over OTLP/HTTP
    otlp_spans       Turns a finished request into OpenTelemetry spans: one trace over all its nodes
    recent           Figures of the last requests: latencies, errors of their estimates, sources of their prompts' KV
    timeline         The timeline of a request across nodes: the events that its acceptor gathers, and their summary
    top              `python mooncake.py top [--url http://HOST:PORT]`: the current state of the cluster, in a
                     terminal
    trace_recorder   Records live traffic as a trace in Mooncake's format, one line per request, for the simulator and
                     other tools
    truth            Compares the estimates of a placement with the measured times
"""
