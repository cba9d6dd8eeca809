"""A kernel of your own: checked, timed, served.

Files:
    command          Swap a kernel by file: check it against the reference grid, time it beside the built-in ones
    naive_attention  An attention backend in thirty lines, to start your own from: gather each request's tokens
"""
