"""The backend for every device of torch: gathers blocks, then calls torch's fused attention.

Layout. `index_select` along the block axis of the pool seen as [2, num_kv_heads, num_blocks, block_size, head_size]
copies K and V of whole blocks once into token-contiguous memory, so no second copy is needed:

    decodes of a group   kv [2, num_kv_heads, group, tokens, head_size]   q [num_kv_heads, group, heads per KV head, .]
    a prefill chunk      kv [2, num_kv_heads, tokens, head_size]          q [num_heads, chunk, .]

A decode row sees all its tokens, so the query heads that share a KV head can be the query rows of one product:
grouped-query attention without expanded or repeated K and V (1.8x faster than enable_gqa at 8 heads per KV head).

A chunk after a cached past takes two calls, past without a mask and chunk causal, merged by their log-sum-exp:

    w = sigmoid(lse_past - lse_new)      out = w out_past + (1 - w) out_new

Measured (bfloat16, 9/3 heads of 64, chunk 512, one thread, ms): past 1536 merged 6.9, bool mask 8.0; past 6000 merged
20.0, bool mask 29.1. The mask also costs chunk x context bytes. torch returns the log-sum-exp on the CPU only, so other
devices use the mask.

A latent (attention/latent.py) is gathered once: its K and V are the same rows.

With a window it gathers only the blocks that a row sees, and a mask hides older keys; it cuts a long chunk into pieces
of about a window, so that the work grows with chunk x window. There is no fused kernel for soft caps and sinks: they
use plain products.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attention.codes import planes, rows_of
from attention.interface import RaggedBatch
from attention.rotary import RotateThenWrite

GROUP_TOKENS = 8192
"""Maximum tokens of decodes that are gathered together: in every layer the kernel allocates larger buffers (over 32
MiB) again, and the page faults cost up to eight times the copy."""

MIN_FILL = 0.75
"""A decode joins a group if it fills at least this share of the group's longest context."""


MIN_PIECE = 128
"""Minimum rows of the pieces into which a windowed chunk is cut; otherwise they have about a window."""

PLAIN_ROWS = 128
"""Rows of a chunk whose scores exist at the same time: [num_heads, rows, context] float32."""


@dataclass(slots=True)
class DecodeGroup:
    """Decode rows of similar context length, attended in one product."""

    rows: Tensor  # [group] int64: rows of q
    blocks: Tensor  # [group * blocks per request] int64
    max_len: int  # longest context of the group, tokens from the first gathered block on
    visible: Tensor | None  # [1, group, 1, max_len] bool; None = all contexts have max_len
    unused: Tensor | None  # flat positions in the gathered [group * tokens] that the row must not see


@dataclass(slots=True)
class Chunk:
    """Query rows of one request: a prefill chunk, or a piece of one, after its cached past."""

    first_row: int
    q_len: int
    kv_len: int  # tokens from the first gathered block to the last row's own
    blocks: Tensor  # [blocks] int64
    visible: Tensor | None  # [q_len, kv_len] bool; None = only the causal rule


@dataclass(slots=True)
class Cut:
    """A step's rows in pieces of work."""

    groups: list[DecodeGroup]
    chunks: list[Chunk]


@dataclass(slots=True)
class Plan:
    """The slots of this step's keys and the pieces of its rows; built once, used by every layer."""

    batch: RaggedBatch
    rows: Tensor | None  # rows of k and v to write; None = all
    blocks: Tensor  # [T] int64
    offsets: Tensor  # [T] int64
    cuts: dict[int, Cut] = field(default_factory=dict)  # by window

    def cut(self, window: int) -> Cut:
        """The cut for a window, made at the first layer that needs it. A window that hides no key counts as none."""
        if window >= max(self.batch.kv_lens, default=0):
            window = 0
        if window not in self.cuts:
            spans = [n - first_token(n, window, self.batch) for n in self.batch.kv_lens[: self.batch.num_decodes]]
            groups = [plan_group(self.batch, members, window) for members in group_decodes(spans)]
            self.cuts[window] = Cut(groups, plan_chunks(self.batch, window))
        return self.cuts[window]


class TorchBackend(RotateThenWrite):
    """float32, bfloat16, float16 on any device, and quantized pools."""

    name = "torch"
    reads_codes = True
    takes_sinks = True

    def plan(self, batch: RaggedBatch) -> Plan:
        written = torch.nonzero(batch.slot_mapping >= 0).flatten()
        rows = None if len(written) == len(batch.slot_mapping) else written
        slots = batch.slot_mapping if rows is None else batch.slot_mapping[rows]
        return Plan(batch, rows, blocks=slots // batch.block_size, offsets=slots % batch.block_size)

    def write_kv(self, k: Tensor, v: Tensor, kv: Tensor, batch: RaggedBatch, plan: Plan) -> None:
        if plan.rows is not None:
            k, v = k[plan.rows], v[plan.rows]
        for kind, written in enumerate((k, v)):
            for plane, rows in planes(kv, written):
                by_token = plane[:, kind].transpose(1, 2)  # [num_blocks, block_size, num_kv_heads, n]
                by_token.index_put_((plan.blocks, plan.offsets), rows)

    def attend(
        self,
        q: Tensor,
        kv: Tensor,
        batch: RaggedBatch,
        plan: Plan,
        scale: float,
        *,
        window: int = 0,
        soft_cap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        out, cut = torch.empty_like(q, memory_format=torch.contiguous_format), plan.cut(window)
        for group in cut.groups:
            of_group = q.index_select(0, group.rows)
            out.index_copy_(0, group.rows, attend_group(of_group, kv, group, scale, soft_cap, sinks))
        for chunk in cut.chunks:
            rows = slice(chunk.first_row, chunk.first_row + chunk.q_len)
            gathered = gather(kv, chunk.blocks, q.dtype)[:, None, :, : chunk.kv_len]
            k, v = gathered[0], gathered[-1]
            attended = attend_chunk(q[rows].transpose(0, 1)[None], k, v, scale, chunk.visible, soft_cap, sinks)
            out[rows] = attended[0].transpose(0, 1)
        return out


def gather(kv: Tensor, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """K and V of whole blocks, token-contiguous: [2, num_kv_heads, blocks * block_size, head_size]; [1, ...] if both
    are the same memory."""
    if kv.stride(1) == 0:
        kv = kv[:, :1]
    return rows_of(kv, lambda pool: pool.permute(1, 2, 0, 3, 4).index_select(2, blocks).flatten(2, 3), dtype)


def group_decodes(kv_lens: list[int]) -> list[list[int]]:
    """Decode rows in order of decreasing context length, cut where padding would waste more than 1 - MIN_FILL of a row
    or the group would gather more than GROUP_TOKENS."""
    groups: list[list[int]] = []
    longest = 0
    for row in sorted(range(len(kv_lens)), key=lambda row: -kv_lens[row]):
        fits = groups and kv_lens[row] >= MIN_FILL * longest and (len(groups[-1]) + 1) * longest <= GROUP_TOKENS
        if fits:
            groups[-1].append(row)
        else:
            groups.append([row])
            longest = kv_lens[row]
    return groups


def first_token(kv_len: int, window: int, batch: RaggedBatch) -> int:
    """The first token of the block that holds the oldest of the last `window` tokens."""
    return max(0, kv_len - window) // batch.block_size * batch.block_size if window else 0


def plan_group(batch: RaggedBatch, members: list[int], window: int) -> DecodeGroup:
    lens = [batch.kv_lens[row] for row in members]
    firsts = [first_token(kv_len, window, batch) for kv_len in lens]
    spans = [kv_len - first for kv_len, first in zip(lens, firsts, strict=True)]
    max_len, num_blocks = max(spans), -(-max(spans) // batch.block_size)
    device = batch.block_tables.device
    rows, first = torch.tensor(members, device=device), torch.tensor(firsts, device=device)[:, None]
    # A row that needs fewer blocks than the longest may run past its table: the repeated blocks there are not visible.
    columns = first // batch.block_size + torch.arange(num_blocks, device=device)
    tables = batch.block_tables[rows].gather(1, columns.clamp_(max=batch.block_tables.shape[1] - 1))
    group = DecodeGroup(rows, tables.flatten().long(), max_len, None, None)
    if min(spans) < max_len or any(max(0, n - window) > f for n, f in zip(lens, firsts, strict=True) if window):
        position = first + torch.arange(num_blocks * batch.block_size, device=device)
        end = batch.ctx_lens[rows][:, None]
        used = position < end
        if window:
            used &= position >= end - window
        group.visible = used[None, :, None, :max_len]
        group.unused = torch.nonzero(~used.flatten()).flatten()
    return group


def plan_chunks(batch: RaggedBatch, window: int) -> list[Chunk]:
    chunks, first_row = [], batch.num_decodes
    for s in range(batch.num_decodes, batch.num_requests):
        q_len = batch.q_lens[s]
        piece = max(window, MIN_PIECE) if window else max(q_len, 1)
        for begin in range(0, q_len, piece):
            rows = min(piece, q_len - begin)
            end = batch.kv_lens[s] - q_len + begin + rows  # tokens up to the last row's own
            chunks.append(plan_chunk(batch, s, first_row + begin, rows, end, window))
        first_row += q_len
    return chunks


def plan_chunk(batch: RaggedBatch, request: int, first_row: int, q_len: int, end: int, window: int) -> Chunk:
    """Rows at positions end - q_len to end - 1 of a request."""
    first = first_token(end - q_len + 1, window, batch)
    blocks = batch.block_tables[request, first // batch.block_size : -(-end // batch.block_size)].long()
    visible = None
    if end > window > 0:
        position = torch.arange(first, end, device=blocks.device)
        row = position[-q_len:, None]
        visible = (position <= row) & (position > row - window)
    return Chunk(first_row, q_len, end - first, blocks, visible)


def attend_group(
    q: Tensor,
    kv: Tensor,
    group: DecodeGroup,
    scale: float,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [group, num_heads, head_size] -> the same shape."""
    size, num_heads, head_size = q.shape
    num_kv_heads = kv.shape[2]
    gathered = gather(kv, group.blocks, q.dtype)
    if group.unused is not None:
        # The mask alone is not enough: 0 * NaN in a slot without a token is NaN.
        gathered.index_fill_(2, group.unused, 0)
    gathered = gathered.unflatten(2, (size, -1))[:, :, :, : group.max_len]
    k, v = gathered[0], gathered[-1]
    q = q.view(size, num_kv_heads, num_heads // num_kv_heads, head_size).transpose(0, 1)
    if soft_cap or sinks is not None:
        of_heads = None if sinks is None else sinks.view(num_kv_heads, 1, -1, 1)
        out = attend_plain(q, k, v, group.visible, scale, soft_cap, of_heads)
    else:
        out = scaled_dot_product_attention(q, k, v, attn_mask=group.visible, scale=scale)
    return out.transpose(0, 1).reshape(size, num_heads, head_size)


def attend_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    visible: Tensor | None = None,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [1, num_heads, q_len, head_size], k and v [1, num_kv_heads, kv_len, head_size]; the last q_len keys are q's.
    visible [q_len, kv_len] bool replaces the causal rule."""
    past = k.shape[2] - q.shape[2]
    if soft_cap or sinks is not None:
        seen = causal(q, k) if visible is None else visible
        return attend_chunk_plain(q, k, v, scale, seen, soft_cap, sinks)
    if visible is not None:
        return scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale, enable_gqa=True)
    if past == 0:
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    if q.device.type != "cpu":
        return attend_masked(q, k, v, scale)
    with_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    new, new_lse = with_lse(q, k[:, :, past:], v[:, :, past:], 0.0, True, scale=scale)
    old, old_lse = with_lse(q, k[:, :, :past], v[:, :, :past], 0.0, False, scale=scale)
    share = torch.sigmoid(old_lse - new_lse)[..., None]
    # Merged in the type of the log-sum-exp, float32: lerp in bfloat16 triples the error.
    return torch.lerp(new.to(share.dtype), old.to(share.dtype), share).to(q.dtype)


def attend_masked(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Like attend_chunk, with the causal rule as an explicit mask."""
    return scaled_dot_product_attention(q, k, v, attn_mask=causal(q, k), scale=scale, enable_gqa=True)


def causal(q: Tensor, k: Tensor) -> Tensor:
    """[q_len, kv_len] bool: row i is at position kv_len - q_len + i and sees all keys up to it."""
    position = torch.arange(k.shape[2], device=q.device)
    return position[None, :] <= position[k.shape[2] - q.shape[2] :, None]


def attend_chunk_plain(
    q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Tensor, soft_cap: float, sinks: Tensor | None
) -> Tensor:
    """The heads that share a KV head are rows of one product, a few query rows at a time."""
    num_kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    by_kv_head, out = q[0].unflatten(0, (num_kv_heads, group)), torch.empty_like(q[0])
    for begin in range(0, q.shape[2], PLAIN_ROWS):
        rows = slice(begin, begin + PLAIN_ROWS)
        part = by_kv_head[:, :, rows]  # [num_kv_heads, group, rows, head_size]
        mask = visible[rows].repeat(group, 1)
        of_rows = None
        if sinks is not None:
            of_rows = sinks.view(num_kv_heads, group, 1).expand(-1, -1, part.shape[2]).flatten(1)[..., None]
        attended = attend_plain(part.flatten(1, 2), k[0], v[0], mask, scale, soft_cap, of_rows)
        out[:, rows] = attended.view(part.shape).flatten(0, 1)
    return out[None]


def attend_plain(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float, soft_cap: float, sinks: Tensor | None
) -> Tensor:
    """q [..., rows, head_size], k and v [..., tokens, head_size]; products in the type of q, as transformers has them;
    scale, caps and softmax in float32. sinks: one score per row, of a shape that expands to [..., rows, 1]."""
    scores = (q @ k.mT).float()
    scores = soft_cap * (scores * (scale / soft_cap)).tanh() if soft_cap else scores * scale
    if visible is not None:
        scores.masked_fill_(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().expand(*scores.shape[:-1], 1)), -1)
    return scores.softmax(-1)[..., : k.shape[-2]].to(q.dtype) @ v
