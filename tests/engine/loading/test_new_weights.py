"""New weights are made into a model that computes as the running one does."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from engine.checkpoint import weights
from engine.config.config import Config
from engine.loading.new_weights import load_new_weights
from tests.engine.tiny_families import ours, save


@pytest.mark.parametrize("form", ["absorbed", "heads"])
def test_prompts_over_a_latent_keep_the_form_that_the_user_chose(tmp_path, form):
    save("deepseek2-lite", tmp_path)
    source, running = ours(tmp_path, latent_prompts=form)
    kept = weights.KeptWeights(weights.load(source, torch.float32))
    opened = SimpleNamespace(opened=lambda: nullcontext(kept), key=lambda: b"new")
    made = load_new_weights(Config(device="cpu", dtype="float32", latent_prompts=form), source, opened, running)  # type: ignore[arg-type]
    latent = made.runner.model.layers[0].latent
    assert latent is not None and latent.sizes.prompts == form
