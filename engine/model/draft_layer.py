"""The input of the layer that drafts: multi-token prediction (DeepSeek-V3).

Behind the last layer a checkpoint may have one more (arXiv 2412.19437, section 2.2). It predicts the token after the
next one, from the model's output h_i at position i and the next token t_(i+1):

    x_i = eh [enorm(embed(t_(i+1))) | hnorm(h_i)]      g_i = head_norm(layer(x_i))      logits = lm_head(g_i)

h_i is the output of the model's last norm. embed and lm_head are the model's own. The layer attends to its own KV,
which lies in the pool as that of a further layer. The row of position i depends on the token after it, so it is written
in the step that finds this token.

For a further token, the layer reads its own output g_i in place of h_(i+1), and the token that it predicted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.ops.interface import Linear, Ops


@dataclass(frozen=True, slots=True)
class DraftInput:
    """See DraftLayer.enter (engine/model/decoder.py): of embed(t_(i+1)) and h_i."""

    enorm: Tensor  # [H]
    hnorm: Tensor  # [H]
    join: Linear  # [H, 2 H]: eh
    attn_norm: Tensor  # [H]: of the layer
    first: Linear  # the layer's
    ops: Ops
    eps: float

    def __call__(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        x = self.joined(embedded, hidden)
        return x, self.first(self.ops.rms_norm(x, self.attn_norm, self.eps))

    def joined(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """x_i [T, H]."""
        halves = self.ops.rms_norm(embedded, self.enorm, self.eps), self.ops.rms_norm(hidden, self.hnorm, self.eps)
        return self.join(torch.cat(halves, 1))
