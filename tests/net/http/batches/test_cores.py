"""The pure parts of batches, and their files after a process that was killed while it wrote."""

from __future__ import annotations

import tracemalloc

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from net.http.batches.files import Files, new_id
from net.http.batches.journal import Journal
from net.http.batches.line import LineError, parse
from net.http.batches.pace import WAITING, Pace
from net.http.batches.places import Place, line_at, places
from net.http.batches.record import STATES, Batch

ENDPOINT = "/v1/completions"


def raw(**fields) -> bytes:
    line = {"custom_id": "a", "method": "POST", "url": ENDPOINT, "body": {"model": "m", "prompt": "x"}}
    return orjson.dumps(line | fields)


def nested(levels: int) -> list:
    value: list = []
    for _ in range(levels - 1):
        value = [value]
    return value


def test_a_line():
    line = parse(raw(), 3, ENDPOINT, "m")
    assert (line.number, line.custom_id, line.body) == (3, "a", {"model": "m", "prompt": "x"})
    assert parse(raw(body={"model": "m", "prompt": nested(99)}), 0, ENDPOINT, "m").body["prompt"] == nested(99)


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (b"{", "invalid_json_line"),
        (b"[]", "invalid_json_line"),
        (raw(custom_id=7), "missing_required_parameter"),
        (raw(custom_id=""), "missing_required_parameter"),
        (raw(method="GET"), "invalid_method"),
        (raw(url="/v1/chat/completions"), "invalid_url"),
        (raw(body=[]), "missing_required_parameter"),
        (raw(body={"model": "other"}), "model_not_found"),
        (raw(body={"model": "m", "stream": True}), "invalid_value"),
        (raw(body={"model": "m", "prompt": nested(100)}), "invalid_value"),
        (raw(body={"model": "m", "prompt": [7] * 300_000}), "line_too_long"),
    ],
)
def test_a_line_that_no_batch_answers(bad, code):
    with pytest.raises(LineError) as refused:
        parse(bad, 0, ENDPOINT, "m")
    assert refused.value.entry(1)["code"] == code


@pytest.mark.parametrize("valid_for", ["m", None])
def test_lines_stay_on_the_disk(tmp_path, monkeypatch, valid_for):
    monkeypatch.setattr("net.http.batches.places.MAX_LINE_BYTES", 200)
    monkeypatch.setattr("net.http.batches.line.MAX_LINE_BYTES", 200)
    path, long = tmp_path / "lines", raw(custom_id="é", body={"model": "m", "prompt": "x" * 500})
    path.write_bytes(b"\n".join((raw(custom_id="ä"), b"", b" ", long, raw(), raw(custom_id="end"), raw())))
    found, errors = places(path, ENDPOINT, valid_for)
    assert [(one.number, one.custom_id) for one in found] == [(0, "ä"), (2, "a"), (3, "end")]
    assert [(one["line"], one["code"]) for one in errors] == [(2, "line_too_long"), (5, "duplicate_custom_id")]
    assert [line_at(path, one, ENDPOINT, "m").custom_id for one in found] == ["ä", "a", "end"]


def test_a_long_file_takes_little_memory(tmp_path):
    path = tmp_path / "lines"
    with path.open("wb") as file:
        for number in range(50):
            body = {"model": "m", "prompt": list(range(1000, 11_000))}
            file.write(raw(custom_id=str(number), body=body) + b"\n")
    tracemalloc.start()
    try:
        found, _ = places(path, ENDPOINT, "m")
        held, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    size = path.stat().st_size
    assert len(found) == 50 and held < size / 50 and most < size / 2


def test_bodies_are_checked_once(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(raw(body={"model": "other"}))
    assert places(path, ENDPOINT, "m")[0] == []
    assert places(path, ENDPOINT, None) == ([Place(0, "a", 0, len(path.read_bytes()))], [])
    with pytest.raises(LineError, match="serves 'm', not 'other'"):
        line_at(path, Place(0, "a", 0, len(path.read_bytes())), ENDPOINT, "m")


def test_few_lines_wait_for_their_first_token_and_a_refusal_halves_the_rest():
    pace = Pace(8)
    for _ in range(WAITING):
        assert pace.pause_s(0.0) == 0.0
        pace.started()
    assert pace.pause_s(0.0) is None, "the cluster may be full"
    pace.first_token()
    assert pace.pause_s(0.0) == 0.0
    pace.refused(1.0, 2.0)
    pace.refused(1.5, 2.0)
    assert pace.limit == 4 and pace.pause_s(1.5) == 2.0
    pace.ended(had_token=True)
    assert pace.pause_s(4.0) == 0.0
    for _ in range(20):
        pace.went_well()
    assert pace.limit == 8


def test_lines_give_way_to_requests_of_others():
    pace = Pace(8)
    assert pace.pause_s(0.0, others=3) == 0.0, "one line may run"
    pace.started()
    pace.first_token()
    assert pace.pause_s(0.0, others=3) is None
    assert pace.pause_s(0.0, others=0) == 0.0


@given(st.lists(st.sampled_from(["start", "token", "end", "refuse", "wait"])), st.integers(1, 9))
def test_the_pace_never_passes_its_limits(steps, most):
    pace, now, lines = Pace(most), 0.0, list[bool]()
    for step in steps:
        if step == "start" and pace.pause_s(now) == 0.0:
            pace.started()
            lines.append(False)
        elif step == "token" and False in lines:
            lines[lines.index(False)] = True
            pace.first_token()
        elif step == "end" and lines:
            pace.ended(lines.pop())
        elif step == "refuse":
            pace.refused(now, 1.0)
        elif step == "wait":
            now += 1.0
        assert pace.running == len(lines) <= most and 1 <= pace.limit <= most
        assert pace.waiting == lines.count(False) <= WAITING


def test_states_of_a_batch():
    batch = Batch("batch-1", ENDPOINT, "file-1", "24h", 1000)
    assert batch.expires_at == 1000 + 86_400
    batch.move("in_progress", 1001)
    batch.counts.add(True, {"prompt_tokens": 3, "completion_tokens": 2})
    batch.counts.add(False, {})
    assert Batch.of(orjson.loads(orjson.dumps(batch.kept()))) == batch
    batch.move("finalizing", 1002)
    batch.move("completed", 1003)
    shown = batch.shown()
    assert (shown["in_progress_at"], shown["completed_at"], shown["failed_at"]) == (1001, 1003, None)
    assert shown["request_counts"] == {"total": 0, "completed": 1, "failed": 1}
    assert shown["usage"] == {"input_tokens": 3, "output_tokens": 2, "total_tokens": 5}
    for state in STATES:
        with pytest.raises(ValueError, match="completed cannot become"):
            batch.move(state, 1004)


@given(cut=st.integers(0, 400))
def test_a_torn_line_is_cut_off(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("journal") / "lines"
    journal = Journal(path)
    for number in range(5):
        journal.add(number, number % 2 == 0, {"custom_id": f"line {number}"})
    journal.close()
    data = path.read_bytes()
    path.write_bytes(data[:cut])
    again = Journal(path)
    whole = data[:cut].count(b"\n")
    assert [number for number, _, _ in again.entries()] == list(range(whole))
    again.add(9, True, {})
    assert [number for number, _, _ in again.entries()] == [*range(whole), 9]
    again.close()


def test_files_without_their_json_are_deleted_at_the_next_start(tmp_path):
    files = Files(tmp_path)
    whole, torn = new_id("file"), new_id("file")
    for file_id in (whole, torn):
        files.path(file_id).write_bytes(b"x")
    files.add(whole, "a.jsonl", "batch", 1000, 3600)
    again = Files(tmp_path)
    assert [one["id"] for one in again.all(1001)] == [whole]
    assert not again.path(torn).exists()
    assert again.all(1000 + 3600) == [] and not again.path(whole).exists(), "it has expired"
    with pytest.raises(KeyError):
        again.path("../lock")
