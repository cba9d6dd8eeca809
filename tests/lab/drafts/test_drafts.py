"""A draft model that is cut out of a target: its forward pass, its training, its files, and the text it learns from."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from engine.checkpoint.model_source import describe
from engine.config.config import EMBEDDED_MODEL
from engine.model.model_error import ModelError
from engine.step.inputs import Row
from engine.text.tokenizer import Tokenizer
from lab.drafts import distill
from lab.drafts.command import main
from lab.drafts.cut import Recipe, about, make, path_of
from lab.drafts.distill import Draft, agreement, batches, train
from lab.drafts.llama import check_plain, hidden, normalized
from lab.drafts.texts import Conversation, opening, written
from tests.engine.tiny_llama import logits_of, our_config, our_weights, runner, tiny

torch.set_num_threads(1)
LAYERS = 2


@pytest.fixture(scope="module")
def target():
    """(transformers' model, our weights, our config) of three layers."""
    theirs = tiny()
    return theirs, our_weights(theirs), our_config(theirs)


@pytest.fixture(scope="module")
def texts(target) -> list[Conversation]:
    """What the target says at temperature 1 after random prompts."""
    drawn = torch.Generator().manual_seed(1)
    prompts = [torch.randint(211, (6,), generator=drawn).tolist() for _ in range(96)]
    said = written(runner(target[0], num_blocks=256), prompts, 24, 1.0, seed=3)
    return [Conversation(prompt + answer, len(prompt)) for prompt, answer in zip(prompts, said, strict=True)]


def test_the_forward_pass_is_transformers(target):
    theirs, weights, config = target
    tokens = torch.randint(211, (2, 30), generator=torch.Generator().manual_seed(2))
    out = normalized(hidden(weights, config, tokens, config.num_layers), config.rms_norm_eps) * weights["norm"]
    torch.testing.assert_close(out @ weights["embed"].T, theirs(tokens).logits, atol=2e-4, rtol=2e-4)


def test_padding_changes_nothing(target):
    """What the padding is changes no bit. How long it is may change the order of a product's sums, so the last bits:
    elements round relative to the largest ones of the sums they come from."""
    _, weights, config = target
    tokens, others = torch.randint(211, (2, 1, 30), generator=torch.Generator().manual_seed(2))
    padded = hidden(weights, config, tokens, config.num_layers)[:, :20]
    others[:, :20] = tokens[:, :20]
    assert torch.equal(hidden(weights, config, others, config.num_layers)[:, :20], padded)
    short = hidden(weights, config, tokens[:, :20], config.num_layers)
    torch.testing.assert_close(padded / short.abs().max(), short / short.abs().max())


def test_the_text_is_what_the_model_says(target, texts):
    """Another seed says something else, and greedy text is the argmax of the logits."""
    theirs, *_ = target
    prompts = [one.tokens[: one.answer] for one in texts[:4]]
    ours = runner(theirs, num_blocks=256)
    assert written(ours, prompts, 24, 1.0, seed=3) == [one.tokens[one.answer :] for one in texts[:4]]
    assert written(ours, prompts, 24, 1.0, seed=4) != written(ours, prompts, 24, 1.0, seed=3)
    (greedy,) = written(ours, prompts[:1], 5, 0.0, seed=0)
    whole = torch.tensor([prompts[0] + greedy])
    assert theirs(whole).logits[0, len(prompts[0]) - 1 : -1].argmax(-1).tolist() == greedy


def test_fitting_and_training_bring_the_draft_closer_to_its_target(target, texts):
    """Judged on text that neither of them has seen."""
    _, weights, config = target
    held_out, found = batches(weights, config, texts[:16]), batches(weights, config, texts[16:])
    draft, losses = Draft(weights, config, LAYERS), []
    cut = agreement(draft, weights["embed"], held_out)
    draft.fit(found)
    fitted = agreement(draft, weights["embed"], held_out)
    train(draft, weights["embed"], found, 6, 0, lambda step, loss: losses.append(loss))
    trained = agreement(draft, weights["embed"], held_out)
    assert fitted.sampled > cut.sampled and trained.sampled > cut.sampled
    assert len(losses) == 6 * len(found) and all(loss >= 0 for loss in losses)
    assert sum(losses[-len(found) :]) < 0.9 * sum(losses[: len(found)]), "the map was the best one for these layers"


def test_the_same_seed_trains_the_same_draft(target, texts, monkeypatch):
    monkeypatch.setattr(distill, "BATCH_TOKENS", 128)

    def trained(seed: int) -> torch.Tensor:
        _, weights, config = target
        draft = Draft(weights, config, LAYERS)
        train(draft, weights["embed"], batches(weights, config, texts[:16]), 1, seed, lambda step, loss: None)
        return draft.map.detach()

    assert torch.equal(trained(1), trained(1))
    with torch.no_grad():  # as in a process with a node
        assert not torch.equal(trained(1), trained(2))


def test_agreement_counts_the_answers_only(target, texts):
    """The target agrees with itself everywhere; a draft that is wrong on prompts alone loses nothing."""
    _, weights, config = target
    (batch,) = batches(weights, config, texts[:4])
    draft = Draft(weights, config, LAYERS)
    draft.outputs = lambda tokens: torch.where(batch.answers[..., None], batch.target.float(), 0.0)
    found = agreement(draft, weights["embed"], [batch])
    assert found.greedy == 1.0 and found.sampled == pytest.approx(1.0)
    assert int(batch.answers.sum()) == sum(len(one.tokens) - one.answer for one in texts[:4])


def test_the_exported_model_says_what_the_draft_says(target, texts):
    """Our own forward pass over the exported weights has the draft's logits."""
    _, weights, config = target
    draft = Draft(weights, config, LAYERS)
    draft.fit(batches(weights, config, texts[:16]))
    small = tiny(layers=LAYERS, tied=False)
    names = our_weights(small).keys()
    exported = draft.exported()
    assert exported.keys() == names
    ours = runner(small)
    shape = replace(config, num_layers=LAYERS, tie_word_embeddings=False)
    ours.model = type(ours.model)(shape, dict(exported), ours.model.backend)
    tokens = texts[0].tokens
    with torch.no_grad():
        out = hidden(exported, config, torch.tensor([tokens]), LAYERS)[0]
        wanted = normalized(out, config.rms_norm_eps) @ draft.map.T
    found = logits_of(ours, [Row(tokens, 0, [0, 1, 2], None)])
    torch.testing.assert_close(found, wanted @ weights["embed"].T, atol=1e-3, rtol=1e-3)


def test_a_user_s_turn_is_opened_and_not_begun():
    tokenizer = Tokenizer.load(describe(EMBEDDED_MODEL))
    begun = opening(tokenizer)
    for text in ("What is it?", "Tell me."):
        assert tokenizer.chat([{"role": "user", "content": text}])[: len(begun)] == begun
    assert tokenizer.decode(begun).endswith("user\n")


def test_what_cannot_be_cut_is_refused(target, tmp_path, capsys):
    _, weights, config = target
    for layers in (0, config.num_layers):
        with pytest.raises(ValueError, match="1 to 2 layers"):
            Draft(weights, config, layers)
    with pytest.raises(ModelError, match="plain Llama"):
        check_plain(replace(config, qk_norm=True))
    assert main(["--out", str(tmp_path / "draft"), "--model", "/nowhere/x.gguf"]) == 2
    assert "no such file" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path)])
    assert "exists already" in capsys.readouterr().err


def test_another_recipe_is_another_draft():
    paths = {path_of(one) for one in (Recipe(), Recipe(seed=1), Recipe(layers=5), Recipe(passes=3))}
    assert len(paths) == 4 and path_of(Recipe()) in paths


@pytest.mark.heavy
def test_a_draft_of_the_embedded_model_serves_as_one(tmp_path):
    """A small recipe: the directory is a model with the target's vocabulary, and draft.json says how it agrees."""
    said = make(Recipe(layers=2, conversations=6, answer_tokens=16, passes=1), tmp_path / "draft", lambda line: None)
    assert said == about(tmp_path / "draft") == json.loads((tmp_path / "draft" / "draft.json").read_text())
    made, target = describe(str(tmp_path / "draft")), describe(EMBEDDED_MODEL)
    assert made.config.num_layers == 2 and not made.config.tie_word_embeddings
    assert not Tokenizer.load(target).disagreement(Tokenizer.load(made))
    assert 0.2 < said["size"] < 0.4
