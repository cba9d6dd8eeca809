"""Gets and puts of a thread that waits for them: no event loop, no switch of threads.

Files:
    lent_slots     Puts into slots that homes of this host have lent to this process
    near_question  TakeQuestion: a put to a home on this host, which copies the blocks from this process's memory
    questions      One question to a home over TCP: blocks between the home and pieces of the caller's memory
    quick_get      Gets of blocks in the calling thread, out of mapped memory or with one question to each home over
                   TCP
    quick_put      Puts of new blocks in the calling thread, in lent slots or with one question to each home
    routes         Which home a thread asks for a block, if it may ask without the event loop
"""
