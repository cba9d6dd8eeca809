"""An attention backend in thirty lines to start from: gathers each request's tokens, then calls torch's SDPA.

  scripts/playground.py attention --backend lab/playground/naive_attention.py

attention/interface.py has the contract. RotateThenWrite provides the rotary embedding, so three methods remain.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from attention.rotary import RotateThenWrite


class Naive(RotateThenWrite):
    name = "naive"

    def plan(self, batch):  # once per step; the other two get its result for every layer
        return None

    def write_kv(self, k, v, kv, batch, plan):  # kv [blocks, 2, kv_heads, block_size, head_size], a strided view
        rows = batch.slot_mapping >= 0
        slot = batch.slot_mapping[rows]
        block, offset = slot // batch.block_size, slot % batch.block_size
        kv[block, 0, :, offset] = k[rows].to(kv.dtype)
        kv[block, 1, :, offset] = v[rows].to(kv.dtype)

    def attend(self, q, kv, batch, plan, scale, *, window=0, soft_cap=0.0):  # q [T, heads, head_size]
        if soft_cap:
            raise NotImplementedError("SDPA has no soft cap")
        out, first = torch.empty_like(q), 0
        for s, (q_len, kv_len) in enumerate(zip(batch.q_lens, batch.kv_lens, strict=True)):
            unseen = max(0, kv_len - q_len + 1 - window) if window else 0  # their blocks may be other requests' now
            token = torch.arange(unseen, kv_len, device=q.device)
            block, offset = batch.block_tables[s, token // batch.block_size].long(), token % batch.block_size
            k, v = (kv[block, i, :, offset].to(q.dtype).transpose(0, 1)[None] for i in (0, 1))
            row = token[-q_len:, None]
            seen = (token <= row) & (token > row - (window or kv_len))
            mine = q[first : first + q_len].transpose(0, 1)[None]
            attended = scaled_dot_product_attention(mine, k, v, attn_mask=seen, scale=scale, enable_gqa=True)
            out[first : first + q_len] = attended[0].transpose(0, 1)
            first += q_len
        return out
