"""The common parts of the modules for other engines: an event loop for callers that wait, and raw memory.

Files:
    forked      A forked child forgets the connections, event loops and lent memory of its parent
    huge_pages  Huge pages under memory of the calling program, for copies between processes
    raw_memory  Memory of the calling program: raw addresses and buffers, as the pieces of one value
"""
