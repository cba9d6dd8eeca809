"""Request traces: read, changed, generated.

Files:
    agents        A seeded stand-in for the tool&agent trace of FAST'25, whose file is not at hand here
    changes       What can be done to a trace, seeded: its prefixes, lengths, arrivals and classes changed
    conversation  A seeded stand-in for the conversation trace of FAST'25, for where its file is not at hand
    draws         Drawing from a distribution that is known by its quantiles
    generate      Seeded request traces in Mooncake's format, for where the released ones are not at hand
    generators    Generated traces by name: (seed, requests) -> rows by time
    shapes        Loads with one property each, seeded: popular prefixes that change, a prefix that goes viral
    synthetic     A seeded stand-in for the synthetic trace of FAST'25 (ShareGPT, L-Eval, LooGLE 1:1:1)
    trace         Mooncake's trace format, read and written
    traces        Where the released traces are: shared/traces beside a parent of this checkout
"""
