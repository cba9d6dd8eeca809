"""The health of a node's event loop: tasks, clocks, deadlines, stalls.

Files:
    clock        The clock for code that measures and waits, so that tests can replace it
    deadlines    Deadlines of many short waits with one timer: a wait that ends in time, as nearly all do, costs
                 almost nothing
    leaving      The end of a process that does not wait for threads whose work nobody needs any more
    log_context  The HTTP request and the trace for which the logging code works; tasks inherit both
    own_thread   EventLoop: an event loop in its own thread, for callers that wait
    polling      Busy polling: keeps the event loop awake if the next bytes are likely to arrive within microseconds
    restarts     Decides how often to restart a failed background task
    seldom       Rate limit for log lines that strangers can cause, so that they cannot fill a log
    spinning     Whether a thread without an event loop looks again and again for bytes, or sleeps until they arrive
    stalls       StallMonitor: measures how long an event has to wait for the event loop, and why
    supervisor   The exception handler of a node's event loop
    tasks        Background tasks
    turns        Lets tasks continue in the order in which they came, a few per turn of the event loop
"""
