"""Wrong kernels on purpose: does every mistake of the list show in the quick checks?

Files:
    command      Mutates the built-in attention kernels one line at a time, and names the first check that finds each
                 mutant
    delta_table  The mutants of the gated delta rule: a line of a kernel, and what it becomes
    first_fault  The first step of the quick reference grid at which the CPU backend of this checkout is wrong: one
                 line of JSON
    mutant       A mutant: one wrong line of a kernel
    table        The mutants: a line of a kernel, and what it becomes
"""
