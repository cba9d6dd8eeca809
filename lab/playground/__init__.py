"""Your own kernel: checked, timed, served.

Files:
    command          Swaps a kernel by file: checks it against the reference grid, times it against the built-in ones,
                     and serves with it
    naive_attention  An attention backend in thirty lines to start from: gathers each request's tokens, then calls
                     torch's SDPA
"""
