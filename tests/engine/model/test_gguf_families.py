"""GGUF files of several architectures: transformers' weights written under the gguf package's own names, read by us."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from transformers import PreTrainedModel

from attention.choice.choose import choose
from engine.checkpoint import weights
from engine.checkpoint.model_source import describe
from engine.model.decoder import Model
from engine.model.model_config import ModelConfig
from engine.model.model_error import ModelError
from engine.step.runner import Row, Runner
from tests.engine.checkpoint.test_weights import interleave_rows
from tests.engine.model.test_families import their_logits
from tests.engine.model.test_model import TOLERANCE, blocks_for, tokens
from tests.engine.tiny_families import empty_pool, save
from tests.engine.tiny_llama import BLOCK_SIZE, logits_of

ARCHITECTURES = {
    "llama-bias": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}


def write(path: Path, model: PreTrainedModel, arch: gguf.MODEL_ARCH, config: ModelConfig) -> None:
    """As llama.cpp's converter does: its names and keys; q and k of a Llama interleaved."""
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_size)
    writer.add_value_length(config.head_size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    if config.windows:
        writer.add_sliding_window(config.windows[0])
    names = gguf.get_tensor_name_map(arch, config.num_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
        if heads and arch == gguf.MODEL_ARCH.LLAMA:
            values = interleave_rows(values.reshape(len(values), -1), heads).reshape(values.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), values.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_logits_equal_transformers(family, tmp_path):
    theirs = save(family, tmp_path / "hf")
    config = describe(str(tmp_path / "hf")).config
    write(tmp_path / "model.gguf", theirs, ARCHITECTURES[family], config)
    source = describe(str(tmp_path / "model.gguf"))
    assert (source.config.qk_norm, source.config.windows) == (config.qk_norm, config.windows)
    model = Model(source.config, weights.load(source, torch.float32), choose("torch", "cpu"))
    runner = Runner(model, empty_pool(source, torch.float32), BLOCK_SIZE)
    ids = tokens(50)
    torch.testing.assert_close(logits_of(runner, [Row(ids, 0, blocks_for(50))]), their_logits(theirs, ids), **TOLERANCE)


def test_an_architecture_that_is_not_mapped_is_named(tmp_path):
    theirs = save("gemma2", tmp_path / "hf")
    write(tmp_path / "g.gguf", theirs, gguf.MODEL_ARCH.GEMMA2, describe(str(tmp_path / "hf")).config)
    with pytest.raises(ModelError, match="'gemma2' is not supported; supported: 'llama', 'qwen2', 'qwen3'"):
        describe(str(tmp_path / "g.gguf"))
