"""Your own kernel: checked, timed, served.

Files:
    command          Swaps a kernel by file: checks it against the reference grid
    naive_attention  An attention backend in thirty lines to start from: gathers each request's tokens
"""
