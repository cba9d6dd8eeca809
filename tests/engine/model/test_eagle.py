"""A head in the manner of EAGLE-3 against its formulas in float64, on a tiny random model of transformers."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from engine.checkpoint.eagle_head import config_of, with_head
from engine.checkpoint.eagle_weights import load_head
from engine.checkpoint.model_source import describe
from engine.config.flags import UsageError, parse
from engine.config.shape import geometry
from engine.model.model_error import ModelError
from engine.sampling.logit_rules import SamplingRow
from engine.sampling.params import SamplingParams
from engine.speculation.draft_source import draft_source, with_draft_layer
from engine.step.runner import Row
from tests.engine.model.test_model import TOLERANCE, blocks_for, tokens
from tests.engine.tiny_eagle import Weights, save_random
from tests.engine.tiny_families import save
from tests.engine.tiny_mtp import runner_of, source_of

TAPPED = (0, 1, 3)
LENGTH = 45

Saved = tuple[PreTrainedModel, dict[str, Any], Weights, Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    directory = tmp_path_factory.mktemp("eagle")
    model, config, weights = save_random(directory)
    return model, config, weights, directory


class Reference:
    """The head over a whole text, in float64."""

    def __init__(self, model: PreTrainedModel, config: dict[str, Any], weights: Weights) -> None:
        self.model, self.config = model, config
        self.weights = {name.removeprefix("midlayer."): weight.double() for name, weight in weights.items()}

    def features(self, ids: list[int]) -> Tensor:
        """f [T, H] of each position."""
        states = self.model(torch.tensor([ids]), use_cache=False, output_hidden_states=True).hidden_states
        taps = self.config["eagle_aux_hidden_state_layer_ids"]
        return F.linear(torch.cat([states[layer][0] for layer in taps], 1).double(), self.weights["fc.weight"])

    def outputs(self, following: list[int], hidden: Tensor) -> Tensor:
        """x [T, H] at the first T positions, from the tokens behind them and hidden [T, H]."""
        w, embedding = self.weights, self.model.get_input_embeddings().weight.double()
        normed = self.norm(hidden, "hidden_norm")
        row = torch.cat((self.norm(embedding[following], "input_layernorm"), normed), 1)
        q, k, v = (F.linear(row, w[f"self_attn.{n}_proj.weight"]).view(len(row), -1, 32).transpose(0, 1) for n in "qkv")
        q, k = self.rotate(q), self.rotate(k).repeat_interleave(2, 0)
        scores = q @ k.transpose(1, 2) / 32**0.5
        scores = scores.masked_fill(torch.ones(len(row), len(row)).triu(1).bool(), -torch.inf)
        attended = (scores.softmax(-1) @ v.repeat_interleave(2, 0)).transpose(0, 1).flatten(1)
        x = (normed if self.config.get("norm_before_residual") else hidden) + F.linear(
            attended, w["self_attn.o_proj.weight"]
        )
        inner = self.norm(x, "post_attention_layernorm")
        gate, up = (F.linear(inner, w[f"mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        return x + F.linear(F.silu(gate) * up, w["mlp.down_proj.weight"])

    def logits(self, x: Tensor) -> Tensor:
        known = F.linear(self.norm(x, "norm"), self.weights["lm_head.weight"])
        logits = torch.full((len(x), 211), -torch.inf, dtype=torch.float64)
        logits[:, torch.arange(known.shape[1]) + self.weights["d2t"].long()] = known
        return logits

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * self.weights[f"{name}.weight"]

    def rotate(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[1])[:, None] * 500_000.0 ** (-torch.arange(0, 32, 2, dtype=torch.float64) / 32)
        left, right = x.chunk(2, -1)
        return torch.cat((left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()), -1)


def changed(saved: Saved, folder: Path, **config: Any) -> Path:
    """The model and its head with other keys in the head's config.json; None drops a key."""
    shutil.copytree(saved[3], folder, dirs_exist_ok=True)
    path = folder / "head" / "config.json"
    values = {key: value for key, value in (saved[1] | config).items() if value is not None}
    path.write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("norm_first", [False, True])
def test_steps_and_drafts_equal_the_formulas(saved: Saved, tmp_path, backend, norm_first):
    """A prompt in chunks; then a draft of which one token is accepted; then further tokens from the head's own rows."""
    directory = changed(saved, tmp_path / "model", norm_before_residual=norm_first)
    reference = Reference(saved[0], saved[1] | {"norm_before_residual": norm_first}, saved[2])
    ours, ids, table = runner_of(directory, backend=backend), tokens(LENGTH), blocks_for(LENGTH + 16)
    greedy = SamplingParams(temperature=0)
    ours.step([Row(ids[:17], 0, table, next_token=ids[17])])
    ((first,),) = ours.step([Row(ids[17:], 17, table, SamplingRow(greedy, ids, LENGTH))])
    text = [*ids, first.token_id]
    found, hidden = ours.ahead[0], reference.features(text)[:-1]
    truth = reference.outputs(text[1:], hidden)
    torch.testing.assert_close(found, truth[-1:].float(), **TOLERANCE)
    torch.testing.assert_close(ours.model.draft_logits(found), reference.logits(truth[-1:]).float(), **TOLERANCE)

    ((right,),) = ours.step([Row(text[-1:], LENGTH, table, SamplingRow(greedy, text, LENGTH))])
    draft = [text[-1], right.token_id, (right.token_id + 1) % 211]
    (chosen,) = ours.step([Row(draft, LENGTH, table, SamplingRow(greedy, text, LENGTH), 3)])
    text += [token.token_id for token in chosen[:2]]
    hidden = reference.features(text)[:-1]
    truth = reference.outputs(text[1:], hidden)
    torch.testing.assert_close(ours.ahead[0][:2], truth[-2:].float(), **TOLERANCE)

    outputs, guessed = ours.ahead[0][1:2], list[int]()
    for count in range(3):
        (guess,) = ours.guess(outputs, [SamplingRow(greedy, text, LENGTH, draft=tuple(guessed))])
        assert guess.token_id == int(reference.logits(truth[-1:]).argmax())
        guessed.append(guess.token_id)
        outputs = ours.guess_on([Row([guess.token_id], len(text) - 1 + count, table)], outputs)
        hidden = torch.cat((hidden, truth[-1:]))
        truth = reference.outputs([*text[1:], *guessed], hidden)
        torch.testing.assert_close(outputs, truth[-1:].float(), **TOLERANCE)


def test_an_embedding_of_its_own(saved: Saved, tmp_path):
    directory = changed(saved, tmp_path / "model")
    path = directory / "head" / "model.safetensors"
    own = saved[0].get_input_embeddings().weight * 2
    save_file(load_file(path) | {"embed_tokens.weight": own.clone()}, path, {"format": "pt"})
    model = runner_of(directory).model
    assert model.draft is not None and model.draft.embedding is not None
    torch.testing.assert_close(model.draft.embedding.embed(torch.tensor([5])), own[5:6])


def test_the_head_is_a_part_of_every_block_and_of_its_key(saved: Saved):
    flags = parse(["--speculative-method", "eagle", "--speculative-model", str(saved[3] / "head")])
    plain = describe(str(saved[3]))
    source = with_draft_layer(flags, plain)
    assert source.config.eagle is not None and source.config.eagle.taps == TAPPED
    blocks = [geometry(flags, each.config, "float32") for each in (source, plain)]
    assert [each.num_layers for each in blocks] == [5, 4]
    assert source.fingerprint != plain.fingerprint
    assert draft_source(flags) is None
    matrices = [tensor.numel() for name, tensor in saved[2].items() if tensor.dim() == 2]
    assert source.config.num_parameters - plain.config.num_parameters == sum(matrices)


def test_the_layers_that_a_head_reads_if_it_does_not_say(saved: Saved):
    config = {key: value for key, value in saved[1].items() if key != "eagle_aux_hidden_state_layer_ids"}
    model = replace(describe(str(saved[3])).config, num_layers=32)
    assert config_of(config, model, own_embedding=False).taps == (2, 16, 29)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architecture LlamaForCausalLM is not EAGLE-3's"),
        ({"hidden_size": 64}, "hidden_size is 64; only 96 works here"),
        ({"num_key_value_heads": 4}, "num_key_value_heads is 4; only 2 works here"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is False"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 9]}, "inputs of layers 0, 9, and the model has 4 layers"),
        ({"draft_vocab_size": 300}, "draft_vocab_size is 300"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope' is not implemented"),
    ],
)
def test_heads_that_do_not_fit_are_refused_by_key(saved: Saved, tmp_path, keys, reason):
    directory = changed(saved, tmp_path / "model", **keys)
    with pytest.raises(ModelError, match="--speculative-model head does not fit ") as refused:
        with_head(describe(str(directory)), str(directory / "head"))
    assert reason in str(refused.value) and "\n" not in str(refused.value)


def test_weights_that_do_not_fit_are_refused_by_name(saved: Saved, tmp_path):
    directory = changed(saved, tmp_path / "model")
    path = directory / "head" / "model.safetensors"
    whole = load_file(path)
    for change, reason in (
        ({"fc.weight": None}, "lacks 1 weights: fc"),
        ({"d2t": None}, "lacks d2t"),
        ({"d2t": whole["d2t"] + 200}, "d2t does not name"),
        ({"midlayer.mlp.up_proj.weight": torch.zeros(5, 96)}, r"up has shape \[5, 96\]"),
        ({"other.weight": torch.zeros(5)}, "weights that are not EAGLE-3's: other.weight"),
    ):
        tensors = {name: tensor for name, tensor in (whole | change).items() if tensor is not None}
        save_file(tensors, path, {"format": "pt"})
        with pytest.raises(ModelError, match=reason):
            load_head(source_of(directory), torch.float32)


@pytest.mark.parametrize("data", [b"", b"\xff" * 64, b"\x06" + bytes(7) + b"[1, 2]"], ids=["empty", "noise", "list"])
def test_a_damaged_head_is_refused_by_its_file(saved: Saved, tmp_path, data):
    directory = changed(saved, tmp_path / "model")
    (directory / "head" / "model.safetensors").write_bytes(data)
    with pytest.raises(ModelError, match=r"model.safetensors is not a whole safetensors file") as refused:
        with_head(describe(str(directory)), str(directory / "head"))
    assert "\n" not in str(refused.value)


def test_flags_and_models_that_do_not_work_with_a_head(saved: Saved, tmp_path):
    with pytest.raises(UsageError, match="go together"):
        parse(["--speculative-method", "eagle"])
    with pytest.raises(ModelError, match="is no directory with a config"):
        with_head(describe(str(saved[3])), str(tmp_path))


@pytest.mark.parametrize("family", ["granite", "gemma2-caps", "deepseek2-lite"])
def test_models_whose_layers_compute_otherwise_have_no_head(saved: Saved, tmp_path, family):
    save(family, tmp_path)
    with pytest.raises(ModelError, match="for models in the manner of Llama, Mistral and Qwen"):
        with_head(describe(str(tmp_path)), str(saved[3] / "head"))
