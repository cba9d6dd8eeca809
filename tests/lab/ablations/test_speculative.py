"""The simulator drafts and keeps what the benchmark measured; what is only assumed says so."""

from __future__ import annotations

import re

import orjson
import pytest

from engine.speculation.draft import CATCH_UP_TOKENS as engine_pace
from lab.ablations.live.speculative import DRAFT
from lab.ablations.live.table import LIVE
from lab.ablations.simulated import ABLATIONS
from lab.ablations.simulated.speculative import ASSUMED, KV, PLAIN, Drafts, between_nodes, cases, measured
from lab.docs.figures import RESULTS, Result
from lab.simulator.models.speculation import CATCH_UP_TOKENS, kept_tokens, speculating, verifying
from lab.simulator.models.step_models import PRESETS
from tests.lab.ablations.test_readings import table

MODEL = PRESETS["llama3-70b-8xa800"]


def rows(case: str, drafted: float, kept: float):
    values = {"drafts per row and step": drafted, "tokens per row and step": kept}
    return [{"case": case, "metric": metric, "unit": "", "ours": value} for metric, value in values.items()]


def test_drafts_are_those_of_the_largest_batch_of_the_newest_result(tmp_path):
    def write(name: str, *found):
        data = {"config": {}, "commit": "c", "rows": [row for one in found for row in one]}
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(orjson.dumps(data))

    write("2026-01-01-speculative.json", rows("chat x8 ngram auto", 9.0, 9.5))
    write(
        "2026-01-02-speculative.json",
        rows("chat x1 ngram auto", 2.0, 1.9), rows("chat x8 ngram auto", 0.5, 1.25), rows("chat x8 ngram fixed", 4, 2),
        rows("copy x16 draft auto", 3.0, 2.5),
    )  # fmt: skip
    file, found = measured(tmp_path)
    assert file == "2026-01-02-speculative.json"
    assert list(found) == ["n-grams as measured, chat", "draft model as measured, copy"]
    assert found["n-grams as measured, chat"] == Drafts(0.5, 1.25, 0.0, 0.0)
    assert found["draft model as measured, copy"] == Drafts(3.0, 2.5, *ASSUMED["draft model"][1:])
    write("plain/2026-01-03-speculative.json", rows("chat x8 none", 0.0, 1.0))
    with pytest.raises(LookupError, match="no row of a measured acceptance"):
        measured(tmp_path / "plain")


def test_drafts_between_nodes_are_those_of_the_live_ablation(tmp_path):
    """The rows have the cases and metrics of the live ablation itself."""
    assert between_nodes(tmp_path) == ("", {"cold": {}, "warm": {}})
    live, found = LIVE["speculative"], []
    for number, case in enumerate(live.cases(None)):
        of = {"drafts per step": 4.0, "kept per step": 1.5 + number / 10}
        of["draft size"] = 0.3 if DRAFT in case.label else None
        of["draft KV share"] = 0.2 if DRAFT in case.label else None
        assert of.keys() <= live.metrics.keys()
        found += [{"case": case.label, "metric": metric, "unit": "", "ours": value} for metric, value in of.items()]
    (tmp_path / "2026-01-02-speculative-live.json").write_bytes(
        orjson.dumps({"config": {}, "commit": "c", "rows": found})
    )
    between_nodes.cache_clear()
    file, by_kv = between_nodes(tmp_path)
    assert file == "2026-01-02-speculative-live.json"
    assert list(by_kv) == list(KV) == ["cold", "warm"]
    assert by_kv["cold"] == {
        "n-grams between nodes": Drafts(4.0, 1.6, 0.0, 0.0),
        "draft model between nodes": Drafts(4.0, 1.7, 0.3, 0.2),
    }  # fmt: skip
    assert by_kv["warm"]["draft model between nodes"] == Drafts(4.0, 2.0, 0.3, 0.2)


def test_the_engine_and_the_simulator_catch_up_at_the_same_pace():
    assert engine_pace == CATCH_UP_TOKENS


def test_the_ablation_runs_what_was_measured_and_names_what_was_not():
    file, found = measured()
    result = Result.newest("speculative", RESULTS)
    assert file == result.path.name
    made = {case.label: case.model for case in cases(10)}
    for kv in KV:
        assert made[f"{kv}, {PLAIN}"] is None
        for name, one in (found | between_nodes()[1][kv]).items():
            assert made[f"{kv}, {name}"] == verifying(MODEL, one.drafted, one.kept, one.size, one.kv_share)
    kept = result.row("chat x8 ngram auto", "tokens per row and step")["ours"]
    assert found["n-grams as measured, chat"].kept == kept
    others = [label for label in made if not re.search(f"measured|between nodes|{PLAIN}", label)]
    assert len(others) == len(KV) * len(ASSUMED) and all("assumed" in label for label in others)
    assert file in ABLATIONS["speculative"].reading(table("speculative"))


def test_a_step_keeps_at_most_one_token_more_than_it_drafts():
    kept = kept_tokens(4, 0.7)
    assert verifying(MODEL, 4, kept, 0.1, 0.4).decode == speculating(MODEL, 4, 0.7, 0.1, 0.4).decode
    assert verifying(MODEL, 0.0, 1.0).decode == MODEL.decode
    for drafted, wrong in ((1.0, 2.5), (1.0, 0.9), (-1.0, 1.0)):
        with pytest.raises(ValueError, match="at least 1 token"):
            verifying(MODEL, drafted, wrong)


def test_each_drafted_token_reads_the_kv_of_the_draft_model():
    """The time of a step per token of context; n-grams read nothing."""
    assert ASSUMED["draft model"][2] == pytest.approx(131_072 / 327_680)
    plain = MODEL.decode_line(8)[1]
    for drafted in (0, 2, 4):
        assert verifying(MODEL, drafted, 1.0, 0.1, 0.4).decode_line(8)[1] == pytest.approx(plain * (1 + 0.4 * drafted))
        assert verifying(MODEL, drafted, 1.0).decode_line(8)[1] == plain
    assert verifying(MODEL, 4, 2.5, 0.1, 0.4).decode_line(8)[1] == pytest.approx(plain * 2.6 / 2.5)
    for size, share in ((0.1, 0.0), (0.0, 0.4)):
        with pytest.raises(ValueError, match="parameters and KV"):
            verifying(MODEL, 4, 2.5, size, share)
