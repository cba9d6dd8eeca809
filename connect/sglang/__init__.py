"""SGLang's hierarchical cache on our pool.

Files:
    hicache  MooncakeHiCache: our pool as the third tier of SGLang's hierarchical cache
    pages    SGLang's pages in the pool: their names, their memory in a host pool, and how much of a prefix is usable
"""
