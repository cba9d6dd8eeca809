"""Copies between the memory of two processes of one host, whether it is shared or not.

Files:
    process  OtherProcess: reads and writes any memory of another process of this host
"""
