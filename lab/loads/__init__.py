"""Request traces: read, changed, generated.

Files:
    agents        A seeded substitute for the tool&agent trace of FAST'25, if its file is not available
    busy_site     Two sites that read the same documents, one of which gets more requests than it can serve alone
    changes       Seeded changes of a trace: its prefixes, lengths, arrivals or classes; the rest stays
    conversation  A seeded substitute for the conversation trace of FAST'25, if its file is not available
    draws         Draws from a distribution given by its quantiles
    generate      Seeded request traces in Mooncake's format, if the released ones are not available
    generators    Generated traces by name: (seed, requests) -> rows by time
    sessions      Agents and people in sessions, each with a habit: the gap between an answer and the next turn
    shapes        Seeded loads with one property each
    sun           Several sites that follow the sun: the rate of each is a daily wave, and each is shifted by its part
                  of a day
    synthetic     A seeded substitute for the synthetic trace of FAST'25, for machines without its file
    trace         Mooncake's trace format, read and written
    traces        The location of the released traces: shared/traces next to a parent of this checkout
"""
