"""Reads the weights of a head that drafts (engine/checkpoint/eagle_head.py) from its safetensors files."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.checkpoint.eagle_head import COMPUTED, our_name, shapes
from engine.checkpoint.model_source import ModelSource
from engine.model.eagle_config import Eagle
from engine.model.model_error import ModelError


def load_head(source: ModelSource, dtype: torch.dtype, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """The weights of the head of `source` in `dtype`. Raises ModelError if one is missing, unknown or misshapen, or d2t
    names no token of the model."""
    sizes = source.config.eagle
    assert sizes is not None
    found: dict[str, Tensor] = {}
    with ExitStack() as stack:
        for path in source.head_files:
            try:
                file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} is not a whole safetensors file ({error}): fetch it again") from None
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if not name.endswith(COMPUTED):
                    found[our_name(name)] = file.get_tensor(name)
    wanted, folder = shapes(sizes, source.config), source.head_files[0].parent.name
    if missing := [name for name in wanted if name not in found]:
        raise ModelError(f"--speculative-model {folder} lacks {len(missing)} weights: {', '.join(missing[:3])} ...")
    if unknown := [name for name in found if name not in wanted and name != "d2t"]:
        raise ModelError(f"--speculative-model {folder} has weights that are not EAGLE-3's: {', '.join(unknown[:3])}")
    for name, shape in wanted.items():
        if tuple(found[name].shape) != shape:
            raise ModelError(
                f"--speculative-model {folder}: {name} has shape {list(found[name].shape)}, for {source.name} it must "
                f"be {list(shape)}"
            )
    _check_tokens(found.get("d2t"), sizes, source, folder)
    return {
        name: tensor.to(device) if name == "d2t" else tensor.to(device, dtype).contiguous()
        for name, tensor in found.items()
    }


def _check_tokens(d2t: Tensor | None, sizes: Eagle, source: ModelSource, folder: str) -> None:
    vocab = source.config.vocab_size
    if d2t is None:
        if sizes.vocab_size != vocab:
            raise ModelError(
                f"--speculative-model {folder} lacks d2t: it says which {sizes.vocab_size} tokens it knows"
            )
        return
    tokens = torch.arange(len(d2t)) + d2t.long()
    if len(d2t) != sizes.vocab_size or not bool(((tokens >= 0) & (tokens < vocab)).all()):
        raise ModelError(f"--speculative-model {folder}: d2t does not name {sizes.vocab_size} of the {vocab} tokens")
