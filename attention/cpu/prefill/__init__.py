"""Prefill attention: many rows per request, by products in float32 or bfloat16.

Files:
    flash.h        Attention of many rows over the paged pool; queries are lanes, so nothing is reduced across lanes
    flash_bf16.h   flash.h with bfloat16 products summed in float32: AMX tiles, or vdpbf16ps where there is no AMX
    flash_float.h  flash.h with float32 products by broadcast and multiply-add, over a pool of any type; T is float
                   for codes
    prefill.cpp    Paged attention of many rows per request: which path computes it, and how the columns are split
                   over threads
"""
