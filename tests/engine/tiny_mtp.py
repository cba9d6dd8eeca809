"""Tiny DeepSeek-V3 models with a layer that drafts, in one checkpoint as DeepSeek publishes it.

A random layer guesses nothing. So there is also a constructed checkpoint, whose layer guesses well: the model has one
layer, and the layer that drafts is a copy of it. eh takes the next token's embedding and nothing of the model's output,
and the norm before it changes no embedding. At position i the layer thus computes what the model computes at i + 1, but
without the first token. It is right as often as the first token makes no difference, and only with the others' KV.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from attention.choice.choose import choose
from engine.checkpoint import weights
from engine.checkpoint.eagle_head import with_head
from engine.checkpoint.eagle_weights import load_head
from engine.checkpoint.model_source import ModelSource, describe
from engine.model.decoder import Model
from engine.model.eagle import eagle_layer
from engine.step.runner import Runner
from tests.engine.tiny_families import empty_pool, save
from tests.engine.tiny_llama import BLOCK_SIZE

SIZE = 0.15
"""Of an embedding's elements, in the mean square."""


def save_random(directory: Path, **more: Any) -> tuple[PreTrainedModel, MtpModel]:
    """The model and its layer in float32, as transformers made them and as this saved them; all weights random."""
    model = save("deepseek3", directory, num_nextn_predict_layers=1, **more)
    layer = MtpModel(model, 1).eval().requires_grad_(False)
    torch.manual_seed(8)
    for name, parameter in layer.layers.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0).add_(torch.randn_like(parameter) * 0.2)
        else:
            torch.nn.init.normal_(parameter, std=0.15)
    for name, buffer in layer.layers.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn_like(buffer) * 0.2)
    _add(directory, model, layer)
    return model, layer


def save_agreeing(directory: Path, **more: Any) -> PreTrainedModel:
    """The constructed checkpoint."""
    model, layer = save_random(directory, num_hidden_layers=1, first_k_dense_replace=0, **more)
    embedding, drafts = model.get_input_embeddings().weight, layer.layers[0]
    torch.nn.init.normal_(embedding[0])  # the padding's is zero
    embedding.mul_(SIZE / embedding.square().mean(-1, keepdim=True).sqrt())
    model.save_pretrained(directory)
    drafts.mtp_block.load_state_dict(model.model.layers[0].state_dict())
    drafts.post_norm.load_state_dict(model.model.norm.state_dict())
    drafts.enorm.weight.fill_(SIZE)
    hidden = embedding.shape[1]
    drafts.eh_proj.weight.copy_(torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), 1))
    _add(directory, model, layer)
    return model


def _add(directory: Path, model: PreTrainedModel, layer: MtpModel) -> None:
    """Write the layer into the checkpoint, with the copies of embedding and head that DeepSeek publishes."""
    path, at = directory / "model.safetensors", f"model.layers.{model.config.num_hidden_layers}."
    tensors = {name: tensor for name, tensor in load_file(path).items() if not name.startswith(at)}
    for name, tensor in layer.layers[0].state_dict().items():
        tensors |= {at + theirs: part for theirs, part in _published(name, tensor).items()}
    tensors[at + "embed_tokens.weight"] = model.get_input_embeddings().weight
    tensors[at + "shared_head.head.weight"] = model.lm_head.weight
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})


def _published(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A weight of transformers' layer under the names of the checkpoint: experts one by one."""
    name = name.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
    before, joined, _ = name.partition("experts.gate_up_proj")
    if joined:
        halves = [part.chunk(2) for part in tensor]
        return {
            f"{before}experts.{expert}.{kind}_proj.weight": half
            for expert, both in enumerate(halves)
            for kind, half in zip(("gate", "up"), both, strict=True)
        }
    before, joined, _ = name.partition("experts.down_proj")
    if joined and not before.endswith("shared_"):
        return {f"{before}experts.{expert}.down_proj.weight": part for expert, part in enumerate(tensor)}
    return {name: tensor}


def source_of(directory: Path, drafts: bool = True) -> ModelSource:
    """The saved model, with the layer that drafts or without. A head lies in the folder `head` (tiny_eagle.py)."""
    source = describe(str(directory))
    if (directory / "head").is_dir():
        return with_head(source, str(directory / "head")) if drafts else source
    return replace(source, config=replace(source.config, draft_layers=int(drafts)))


def runner_of(directory: Path, drafts: bool = True, backend: str = "torch", num_blocks: int = 64) -> Runner:
    """The saved model by our loader; its KV pool starts as NaN."""
    source = source_of(directory, drafts)
    model = Model(source.config, weights.load(source, torch.float32), choose(backend, "cpu"))
    if (sizes := source.config.eagle) is not None:
        model.draft = eagle_layer(sizes, load_head(source, torch.float32), source.config, model.ops, model.device)
    return Runner(model, empty_pool(source, torch.float32, num_blocks), BLOCK_SIZE)
