"""What keeps the event loop of a node healthy: tasks, clocks, deadlines, stalls.

Files:
    clock        The clock of those who measure and wait, so that tests can bring their own
    deadlines    Deadlines of many short waits with one timer: a wait that ends in time, as nearly all do
    log_context  Which HTTP request the code that logs works for, and the trace it is a part of
    polling      Busy polling: the event loop does not sleep in the moment in which the next bytes come
    restarts     Decides how often to restart a failed background task
    seldom       Lines that strangers can cause: seldom enough that they cannot fill a log
    stalls       StallMonitor: how long an event that arrives now has to wait for the event loop
    supervisor   The exception handler of a node's event loop
    tasks        Background tasks
"""
