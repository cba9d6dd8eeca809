"""Makes the draft model of a recipe, once per machine: it is kept in $XDG_CACHE_HOME/mooncake/drafts."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint.model_source import ModelSource, describe
from engine.checkpoint.weights import load
from engine.config.config import EMBEDDED_MODEL
from engine.text.tokenizer import Tokenizer
from lab.drafts.distill import HELD_OUT, Agreement, Draft, agreement, batches, train
from lab.drafts.llama import check_plain
from lab.drafts.runner import runner_of
from lab.drafts.texts import Conversation, conversations
from lab.tools.export_hf import write_model
from net.compiled import folder

ABOUT = "draft.json"
"""In the directory of a draft: its recipe, and how well it agrees with its target."""

VERSION = 1
"""Of what a recipe means: another number makes every draft again."""

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a draft is made. The defaults take about ten minutes on two idle cores."""

    model: str = EMBEDDED_MODEL  # or a GGUF file of a plain Llama that chats
    layers: int = 4
    conversations: int = 256
    answer_tokens: int = 160
    passes: int = 4
    seed: int = 0


def path_of(recipe: Recipe) -> Path:
    """Where `made` keeps the draft, which may not exist. Raises ModelError."""
    what = json.dumps([VERSION, describe(recipe.model).fingerprint, asdict(recipe) | {"model": ""}])
    return folder("drafts") / blake2b(what.encode(), digest_size=10).hexdigest()


def made(recipe: Recipe, tell: Tell) -> Path:
    """The directory of the draft in the cache of this machine; it is made if it is missing. Raises ModelError,
    ValueError, OSError."""
    path = path_of(recipe)
    if not (path / ABOUT).exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            make(recipe, Path(scratch) / "draft", tell)
            (Path(scratch) / "draft").rename(path)
    return path


def about(directory: Path) -> dict[str, Any]:
    """What `make` wrote about a draft. Raises OSError, ValueError."""
    found: dict[str, Any] = json.loads((directory / ABOUT).read_text())
    return found


def make(recipe: Recipe, directory: Path, tell: Tell) -> dict[str, Any]:
    """Makes the draft and writes it to `directory`, a Hugging Face model; returns what ABOUT says. Raises ModelError,
    ValueError, OSError."""
    source = describe(recipe.model)
    check_plain(source.config)
    tell(f"{recipe.model} writes {recipe.conversations} conversations")
    runner = runner_of(recipe.model, "bfloat16")
    texts = conversations(runner, Tokenizer.load(source), recipe.conversations, recipe.answer_tokens, recipe.seed)
    del runner
    draft, judged = distilled(recipe, source, texts, tell)
    size = sum(tensor.numel() for tensor in draft.exported().values()) - draft.exported()["embed"].numel()
    whole = sum(tensor.numel() for tensor in load(source, torch.bfloat16).values())
    config = replace(source.config, num_layers=recipe.layers, tie_word_embeddings=False)
    weights = {name: tensor.bfloat16().contiguous() for name, tensor in draft.exported().items()}
    write_model(recipe.model, config, weights, directory, "bfloat16")
    said = asdict(recipe) | {"tokens": sum(len(one.tokens) for one in texts), "size": size / whole}
    said |= {name: asdict(one) for name, one in judged.items()}
    (directory / ABOUT).write_text(json.dumps(said, indent=2) + "\n")
    return said


def distilled(
    recipe: Recipe, source: ModelSource, texts: Sequence[Conversation], tell: Tell
) -> tuple[Draft, dict[str, Agreement]]:
    """The trained draft, and its agreement with the target when it was cut, with the fitted map, and in the end. Raises
    ModelError, ValueError."""
    target, apart = load(source, torch.bfloat16), max(1, round(HELD_OUT * len(texts)))
    if len(texts) <= apart:
        raise ValueError("two conversations or more are needed: some are held out")
    embed = target["embed"].float()
    tell("the target's outputs over this text")
    held_out, found = (batches(target, source.config, part) for part in (texts[:apart], texts[apart:]))
    draft = Draft(target, source.config, recipe.layers)
    judged = {"cut": agreement(draft, embed, held_out)}
    draft.fit(found)
    judged["fitted"] = agreement(draft, embed, held_out)
    steps = recipe.passes * len(found)

    def trained(step: int, loss: float) -> None:
        tell(f"step {step}/{steps}, loss {loss:.3f}")

    train(draft, embed, found, recipe.passes, recipe.seed, trained)
    judged["trained"] = agreement(draft, embed, held_out)
    return draft, judged
