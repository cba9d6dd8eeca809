"""The live ablation of speculation: its prompts, its counts, and the draft model that its nodes get."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from engine.speculation.speculative import Speculator, VerifyCost
from lab.ablations.live import speculative
from lab.ablations.live.run import run_case
from lab.ablations.live.speculative import (
    COLD,
    COUNTS,
    DRAFT,
    PASSAGE_TOKENS,
    WARM,
    WARM_PASSAGES,
    asked,
    counted,
    draft_shares,
    per_step,
)
from lab.ablations.live.table import LIVE
from lab.drafts.cut import Recipe


def heads(kv: str, seed: int) -> list[tuple[int, ...]]:
    return [tuple(spec.token_ids[:200]) for spec in asked(kv, seed, 20.0)]


def test_cold_texts_are_new_and_warm_ones_come_back():
    cold, warm = heads(COLD, 0), heads(WARM, 0)
    assert len(set(cold)) == len(cold) == len(warm) == 10
    assert len(set(warm)) == WARM_PASSAGES and not set(warm) & set(cold)
    assert set(heads(WARM, 1)) == set(warm) and set(heads(COLD, 1)) != set(cold)
    assert all(PASSAGE_TOKENS <= len(spec.token_ids) <= PASSAGE_TOKENS + 80 for spec in asked(COLD, 0, 20.0))
    with pytest.raises(ValueError, match="lower --seconds"):
        asked(COLD, 0, 2000.0)


def test_means_are_over_all_decode_steps():
    """As n-grams draft in some steps only, means over those would say more than a request gets."""
    counts = {"decode_rows": 40, "draft_tokens": 40, "accepted_tokens": 15, "prompt_tokens": 1200}
    assert per_step(counts, 3) == {
        "drafted": 1.0, "kept": 1.375, "acceptance": 0.375, "draft_prompt_tokens": 400.0,
    }  # fmt: skip
    never = per_step(counts | {"draft_tokens": 0, "accepted_tokens": 0, "prompt_tokens": 0}, 3)
    assert never == {"drafted": 0.0, "kept": 1.0, "draft_prompt_tokens": 0.0}, "nothing was found to draft"
    assert per_step(dict.fromkeys(counts, 0), 3) == {}, "nodes that do not speculate"


def test_nodes_tell_the_counts(monkeypatch):
    own = Speculator("ngram", 4, None, "fixed", 100, lambda rows, context: VerifyCost(1.0, 0.0, 0.0, 0.0))
    told = {
        "a": {"engine": {"speculation": own.state(), "draft_model": {"prompt_tokens": 7}}},
        "b": {"engine": {"speculation": own.state() | {"decode_rows": 5, "draft_tokens": 2}, "draft_model": None}},
        "c": {"engine": {"speculation": None, "draft_model": None}},
    }
    assert set(COUNTS) <= own.state().keys()
    monkeypatch.setattr(speculative.rest, "get", lambda url: told[url.removesuffix("/debug/state")])
    assert counted(list(told)) == {"decode_rows": 5, "draft_tokens": 2, "accepted_tokens": 0, "prompt_tokens": 7}


def test_the_shares_of_a_draft_are_those_it_was_made_with(tmp_path):
    assert draft_shares({"speculative_model": None}) == draft_shares({"speculative_model": str(tmp_path)}) == {}
    said = asdict(Recipe(layers=6)) | {"size": 0.25}
    (tmp_path / "draft.json").write_text(json.dumps(said))
    found = draft_shares({"speculative_model": str(tmp_path)})
    assert found == {"draft_size": 0.25, "draft_kv_share": 6 / 30}, "of the 30 layers of the embedded model"


def test_only_the_nodes_of_draft_cases_need_a_draft_and_it_is_made_before_they_start(tmp_path, monkeypatch):
    class Asked(Exception):
        pass

    def made(recipe, tell):
        raise Asked

    monkeypatch.setattr(speculative, "made", made)
    cases = LIVE["speculative"].cases(None)
    assert len(cases) == 6
    for case in cases:
        if DRAFT in case.label:
            with pytest.raises(Asked):
                run_case(case, 0, 2.0, tmp_path / "nodes")
        else:
            case.prepare()
    assert not (tmp_path / "nodes").exists()
