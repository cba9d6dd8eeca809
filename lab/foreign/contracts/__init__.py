"""Classes of ours against the released packages that load them, in the interpreters where those are installed.

Files:
    checks           A list of checks that run one after the other and say how each ended
    command          Classes of ours for SGLang and LMCache against the released packages
    lmcache_program  LMCache loads our classes, and runs its own Mooncake connector on our module
    sglang_program   SGLang loads our storage class, and runs its own Mooncake class on our module
"""
