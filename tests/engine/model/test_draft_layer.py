"""The layer that drafts against transformers' own (MtpModel), in float32, on tiny random DeepSeek-V3 models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from attention.choice.choose import choose
from engine.checkpoint import weights
from engine.checkpoint.model_source import describe
from engine.checkpoint.quantized_weights import load_quantized
from engine.config.flags import UsageError, parse
from engine.config.shape import geometry
from engine.model.decoder import Model
from engine.model.draft_layer import DraftInput
from engine.model.model_error import ModelError
from engine.sampling.logit_rules import SamplingRow
from engine.sampling.params import SamplingParams
from engine.speculation.draft_source import with_draft_layer
from engine.step.inputs import InputBuilder
from engine.step.runner import Row, Runner
from tests.engine.model.test_model import TOLERANCE, blocks_for, tokens
from tests.engine.tiny_llama import BLOCK_SIZE
from tests.engine.tiny_mtp import runner_of, save_random, source_of

LENGTH = 70  # tokens: several blocks
GREEDY = SamplingParams(temperature=0)
MTP = parse(["--speculative-method", "mtp"])

Saved = tuple[PreTrainedModel, MtpModel, Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    directory = tmp_path_factory.mktemp("mtp")
    return *save_random(directory), directory


def their_outputs(layer: MtpModel, ids: list[int], hidden: Tensor) -> Tensor:
    """[T, H] for token ids and the model's outputs [T, H] before each of them."""
    positions = torch.arange(1, len(ids) + 1)[None]
    return layer.forward_layer(0, hidden[None], positions, None, input_ids=torch.tensor([ids]))[0]


def their_hidden(model: PreTrainedModel, ids: list[int]) -> Tensor:
    return model.model(torch.tensor([ids]), use_cache=False).last_hidden_state[0]


def our_outputs(ours: Runner, ids: list[int], chunks: list[int]) -> Tensor:
    """The layer's outputs at all tokens but the last."""
    inputs, done, parts = InputBuilder(BLOCK_SIZE, ours.device), 0, []
    for size in chunks:
        built, hidden = inputs.build([Row(ids[done : done + size], done, blocks_for(len(ids)))]), list[Tensor]()
        ours.model.forward(built.token_ids, built.batch, ours.kv_pool, built.last_rows, on_hidden=hidden.append)
        following = torch.tensor(ids[done + 1 : done + size + 1])
        parts.append(ours.model.forward_draft(following, hidden[0], built.batch, ours.kv_pool))
        done += size
    return torch.cat(parts)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("chunks", [[LENGTH - 1], [16, 30, 1, 1, 21]])
def test_outputs_and_logits_equal_transformers(saved: Saved, backend, chunks):
    model, layer, directory = saved
    ids, ours = tokens(LENGTH), runner_of(directory, backend=backend)
    found = our_outputs(ours, ids, chunks)
    truth = their_outputs(layer, ids[1:], their_hidden(model, ids)[:-1])
    torch.testing.assert_close(found, truth, **TOLERANCE)
    torch.testing.assert_close(ours.model.draft_logits(found), model.lm_head(truth), **TOLERANCE)


def test_against_the_formula(saved: Saved):
    """The input of the layer, and what comes behind it, as in section 2.2 of arXiv 2412.19437 with our own names; the
    layer itself is that of the model, which test_families.py compares."""
    _, layer, directory = saved
    ours, part = runner_of(directory), layer.layers[0]
    assert ours.model.draft is not None
    embedded, hidden = torch.randn(5, 96, dtype=torch.float64), torch.randn(5, 96, dtype=torch.float64)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + ours.model.config.rms_norm_eps).rsqrt() * weight.double()

    joined = torch.cat((norm(embedded, part.enorm.weight), norm(hidden, part.hnorm.weight)), 1)
    truth = joined @ part.eh_proj.weight.double().T
    assert isinstance(ours.model.draft.enter, DraftInput)
    found = ours.model.draft.enter.joined(embedded.float(), hidden.float())
    torch.testing.assert_close(found.double(), truth, rtol=1e-5, atol=1e-5)


def test_steps_of_the_runner(saved: Saved):
    """A batch of two prompts in chunks, one with a draft behind it whose second token is wrong: the outputs behind the
    accepted tokens, and then further draft tokens from the layer's own outputs."""
    model, layer, directory = saved
    ours, first, second = runner_of(directory), tokens(40), tokens(60)[20:]
    tables = [list(range(4)), list(range(4, 10))]

    def row(ids: list[int], start: int, end: int, table: list[int]) -> Row:
        return Row(ids[start:end], start, table, next_token=ids[end])

    ours.step([row(first, 0, 17, tables[0]), row(second, 0, 9, tables[1])])
    assert ours.ahead == {}
    sampled = [SamplingRow(GREEDY, ids, len(ids)) for ids in (first, second)]
    ((one,), (other,)) = ours.step(
        [Row(first[17:], 17, tables[0], sampled[0]), Row(second[9:], 9, tables[1], sampled[1])]
    )
    known = [[*first, one.token_id], [*second, other.token_id]]
    truth = [their_outputs(layer, ids[1:], their_hidden(model, ids)[:-1])[-1:] for ids in known]
    for place in (0, 1):
        torch.testing.assert_close(ours.ahead[place], truth[place], **TOLERANCE)

    (right,) = ours.step([Row(known[0][-1:], 40, tables[0], SamplingRow(GREEDY, known[0], 40))])[0]
    wrong = (right.token_id + 1) % 211
    draft = Row([known[0][-1], right.token_id, wrong], 40, tables[0], SamplingRow(GREEDY, known[0], 40), 3)
    chosen = [token.token_id for token in ours.step([draft])[0]]
    assert chosen[0] == right.token_id and chosen[1] != wrong
    text = [*known[0], *chosen[:2]]
    hidden = their_hidden(model, text)[:-1]
    truth_ = their_outputs(layer, text[1:], hidden)
    torch.testing.assert_close(ours.ahead[0][:2], truth_[-2:], **TOLERANCE)

    outputs, guessed = ours.ahead[0][1:2], list[int]()
    for count in range(4):
        (guess,) = ours.guess(outputs, [SamplingRow(GREEDY, text, 40, draft=tuple(guessed))])
        assert guess.token_id == int(model.lm_head(truth_[-1]).argmax())
        guessed.append(guess.token_id)
        outputs = ours.guess_on([Row([guess.token_id], len(text) - 1 + count, tables[0])], outputs)
        hidden = torch.cat((hidden, truth_[-1:]))
        truth_ = their_outputs(layer, [*text[1:], *guessed], hidden)
        torch.testing.assert_close(outputs, truth_[-1:], **TOLERANCE)


def test_layers_are_reported_in_order_and_waited_for(saved: Saved):
    ours, ids = runner_of(saved[2]), tokens(20)
    done, waited = list[int](), list[int]()
    ours.step([Row(ids[:19], 0, blocks_for(20), next_token=ids[19])], done.append, waited.append)
    assert done == waited == [0, 1, 2, 3, 4]
    rows = ours.kv_pool[blocks_for(20), 4].flatten(0, 3)
    assert rows[:19].isfinite().all() and rows[19:].isnan().all()


def test_other_types_of_weights(saved: Saved):
    """int8 weights: the layer's matrices too. The median, because rounding may choose another expert for a token."""
    _, _, directory = saved
    ids, source = tokens(LENGTH), source_of(directory)
    wide = our_outputs(runner_of(directory), ids, [LENGTH - 1])
    model = Model(source.config, load_quantized(source, "int8", torch.float32), choose("torch", "cpu"))
    pool = runner_of(directory).kv_pool
    found = our_outputs(Runner(model, pool, BLOCK_SIZE), ids, [LENGTH - 1])
    assert 0 < (found - wide).abs().median() < 0.1 * wide.abs().median()


def test_the_layer_is_a_part_of_every_block(saved: Saved):
    source = with_draft_layer(MTP, describe(str(saved[2])))
    plain = replace(source, config=replace(source.config, draft_layers=0))
    blocks = [geometry(MTP, each.config, "float32") for each in (source, plain)]
    assert [each.num_layers for each in blocks] == [5, 4]
    assert blocks[0].block_bytes - blocks[1].block_bytes == blocks[0].layer_bytes
    added = set(weights.shapes(source.config)) - set(weights.shapes(plain.config))
    assert added and all(name.startswith("layers.4.") for name in added)
    more = source.config.num_parameters - plain.config.num_parameters
    matrices = [shape for name, shape in weights.shapes(source.config).items() if name in added and len(shape) == 2]
    assert more == sum(rows * columns for rows, columns in matrices)


def test_models_without_the_layer_are_refused(saved: Saved, tmp_path):
    directory = saved[2]
    plain = describe(str(directory))
    assert with_draft_layer(parse([]), plain) is plain
    none = replace(plain, config=replace(plain.config, num_draft_layers=0))
    with pytest.raises(UsageError, match=r"mtp: the configuration of .* has no num_nextn_predict_layers.*"):
        with_draft_layer(MTP, none)

    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    every = load_file(directory / "model.safetensors")
    kept = {name: tensor for name, tensor in every.items() if ".layers.4." not in name}
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    assert json.loads((tmp_path / "config.json").read_text())["num_nextn_predict_layers"] == 1
    with pytest.raises(ModelError, match=r"mtp: .* lacks \d+ weights of its layer 4.* another method"):
        weights.load(with_draft_layer(MTP, describe(str(tmp_path))), torch.float32)
    weights.load(describe(str(tmp_path)), torch.float32)
    weights.load(plain, torch.float32)  # it has the weights, and nobody asks for them
