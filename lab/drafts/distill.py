"""Cuts a draft model out of a Llama and trains it to say what the whole model says.

The draft has the first k layers and a linear map M of their output h in front of the embedding E of the target:

    draft logits   E M norm(h_k)           target logits   E (g * norm(h_L))

M begins as the ridge regression from norm(h_k) to the target's own normalized output (the tuned lens: Belrose et al.,
arXiv 2303.08112). Then M and the k layers are trained on text of the target (texts.py) by the divergence
KL(target | draft), as in DistillSpec (Zhou et al., arXiv 2310.08461). A step compares the two over the tokens that the
target finds most likely anywhere in its batch, and over some drawn ones; all others would cost nearly all of the time.
The finished draft is a Llama whose output layer is E M.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from engine.model.model_config import ModelConfig
from lab.drafts.llama import LAYER, Weights, hidden, normalized
from lab.drafts.texts import Conversation

BATCH_TOKENS = 2048
RIDGE = 1e-2
LIKELY, DRAWN = 8, 1024
"""The vocabulary of a training step: the LIKELY most likely tokens of every position, and DRAWN others."""

LEARNING_RATE, WARM_UP = 5e-4, 0.1
"""WARM_UP: share of the steps in which the rate rises to LEARNING_RATE; it then falls to 0 as a cosine."""

HELD_OUT = 1 / 16
"""Share of the conversations that judge the draft."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Of a draft with its target over the answers that were held out: the share of equal most likely tokens, and the
    mean of sum_x min(p(x), q(x)), the acceptance of a draft token at temperature 1."""

    greedy: float
    sampled: float


@dataclass(frozen=True, slots=True)
class Batch:
    """Conversations padded to one length. tokens [B, T]; real, answers [B, T]: positions with a next token, and those
    of them whose next token is one of the answer; target [B, T, hidden]: the target's normalized output."""

    tokens: Tensor
    real: Tensor
    answers: Tensor
    target: Tensor


class Draft:
    """The part of a target that drafts: `weights` in float32, with gradients, and `map` [hidden, hidden]."""

    def __init__(self, target: Weights, config: ModelConfig, num_layers: int) -> None:
        """Raises ValueError if the target has too few layers."""
        if not 0 < num_layers < config.num_layers:
            raise ValueError(f"a draft has 1 to {config.num_layers - 1} layers of this model, not {num_layers}")
        self.config, self.num_layers = config, num_layers
        names = [f"layers.{index}.{name}" for index in range(num_layers) for name in LAYER]
        self.weights = {name: target[name].float().clone().requires_grad_() for name in names}
        self.map = torch.eye(config.hidden_size, requires_grad=True)
        self._embed = target["embed"].float()

    @property
    def parameters(self) -> list[Tensor]:
        return [*self.weights.values(), self.map]

    def features(self, tokens: Tensor) -> Tensor:
        """tokens [B, T] -> norm(h_k) [B, T, hidden] in float32."""
        with torch.autocast("cpu", torch.bfloat16):
            out = hidden(self.weights | {"embed": self._embed}, self.config, tokens, self.num_layers)
        return normalized(out, self.config.rms_norm_eps)

    def outputs(self, tokens: Tensor) -> Tensor:
        """M norm(h_k) [B, T, hidden]: logits are its products with the embedding."""
        return self.features(tokens) @ self.map.T

    def fit(self, batches: Sequence[Batch]) -> None:
        """Set the map to the ridge regression from the features to the target's outputs."""
        size = self.config.hidden_size
        squares, products, count = torch.zeros(size, size), torch.zeros(size, size), 0
        with torch.no_grad():
            for batch in batches:
                x, y = self.features(batch.tokens)[batch.real], batch.target[batch.real].float()
                squares, products, count = squares + x.T @ x, products + x.T @ y, count + len(x)
            self.map.copy_(torch.linalg.solve(squares + RIDGE * count * torch.eye(size), products).T)

    def exported(self) -> dict[str, Tensor]:
        """The weights of the finished model: its output layer is no longer the embedding."""
        made = {name: tensor.detach() for name, tensor in self.weights.items()}
        with torch.no_grad():
            head = self._embed @ self.map
        return made | {"embed": self._embed, "norm": torch.ones(self.config.hidden_size), "lm_head": head}


def batches(target: Weights, config: ModelConfig, texts: Sequence[Conversation]) -> list[Batch]:
    """Batches of about BATCH_TOKENS tokens, with the target's outputs."""
    made: list[Batch] = []
    for group in _groups(texts):
        longest = max(len(one.tokens) for one in group)
        tokens = torch.tensor([one.tokens + [0] * (longest - len(one.tokens)) for one in group])
        where = torch.arange(longest)
        real = torch.stack([where < len(one.tokens) - 1 for one in group])
        answers = torch.stack([where >= one.answer - 1 for one in group]) & real
        with torch.no_grad():
            out = normalized(hidden(target, config, tokens, config.num_layers), config.rms_norm_eps)
        made.append(Batch(tokens, real, answers, (out * target["norm"]).bfloat16()))
    return made


def _groups(texts: Sequence[Conversation]) -> Iterator[list[Conversation]]:
    """Conversations of similar lengths, so that little is padded."""
    group: list[Conversation] = []
    for one in sorted(texts, key=lambda one: len(one.tokens)):
        if group and (len(group) + 1) * len(one.tokens) > BATCH_TOKENS:
            yield group
            group = []
        group.append(one)
    if group:
        yield group


@torch.enable_grad()  # a node in this process has switched gradients off (engine/loading/load_model.py)
def train(
    draft: Draft, embed: Tensor, found: Sequence[Batch], passes: int, seed: int, tell: Callable[[int, float], None]
) -> None:
    """embed [V, hidden]. Goes `passes` times over the batches, in an order and with drawn tokens by the seed.
    tell(step, loss) after each step."""
    order, drawn = Random(seed), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(draft.parameters, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    steps = passes * len(found)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
    step = 0
    for _ in range(passes):
        for batch in order.sample(found, len(found)):
            wanted = batch.target[batch.real].float()
            some = _vocabulary(wanted, embed, drawn)
            ours = draft.outputs(batch.tokens)[batch.real] @ some.T
            theirs = wanted @ some.T
            loss = kl_div(ours.log_softmax(-1), theirs.log_softmax(-1), log_target=True, reduction="batchmean")
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(draft.parameters, 1.0)
            optimizer.step()
            rate.step()
            step += 1
            tell(step, loss.item())


def _rate(step: int, steps: int) -> float:
    """Of LEARNING_RATE."""
    warm = max(1.0, WARM_UP * steps)
    return min((step + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * min(1.0, step / steps)))


def _vocabulary(wanted: Tensor, embed: Tensor, drawn: torch.Generator) -> Tensor:
    """Rows of the embedding [V, hidden] for one training step. wanted [N, hidden]: the target's outputs."""
    likely = [(part @ embed.T).topk(LIKELY, -1).indices.flatten() for part in wanted.split(256)]
    others = torch.randint(len(embed), (DRAWN,), generator=drawn)
    return embed[torch.cat([*likely, others]).unique()]


def agreement(draft: Draft, embed: Tensor, found: Sequence[Batch]) -> Agreement:
    """Over the answers of these batches."""
    equal, common, count = 0.0, 0.0, 0
    with torch.no_grad():
        for batch in found:
            pairs = draft.outputs(batch.tokens)[batch.answers], batch.target[batch.answers].float()
            for ours, theirs in zip(*(part.split(256) for part in pairs), strict=True):
                q, p = (part @ embed.T for part in (ours, theirs))
                equal += float((q.argmax(-1) == p.argmax(-1)).sum())
                common += float(torch.minimum(q.softmax(-1), p.softmax(-1)).sum())
                count += len(q)
    return Agreement(equal / count, common / count)
