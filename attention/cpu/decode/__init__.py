"""Decode attention: rows of one token each, by products in float32, bfloat16, tiles or codes.

Files:
    decode.cpp      Paged decode attention: rows of one token each, split over
    decode.h        One token's row against its cached keys, flash-decoding style
    decode_amx.h    One token's row against its cached keys on AMX tiles, K and V straight from the pool, 16 keys a
                    tile
    decode_bf16.h   decode.h with products of bfloat16 pairs, summed in float32, 32 elements at a time
    decode_codes.h  Products of codes for span.h: in float32 for both kinds of codes, in 16-bit integers for int8
    decode_float.h  decode.h with float32 products, over a pool of any type; q is float32
    span.h          Decode over a quantized pool, read in place: decode.h, with the scales of K in the scores, those
                    of V in the weights
"""
