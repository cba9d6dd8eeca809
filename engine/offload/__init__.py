"""Weights that exceed memory: some layers stay, the others are read from disk in every pass, ahead of their use.

Files:
    ring      A ring of buffers that a thread fills in a fixed order, again and again, ahead of the one who uses them
    spool     The weights of layers in a file, in the form in which the kernels read them
    streamed  StreamedLayers: a model of which some layers are in memory, and the others are read from disk in every
              pass
"""
