"""docs/ and the dashboard say what the code says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lab.docs import command as gendocs
from lab.docs import rooms
from lab.docs.refusals import refusals
from net.metrics.events import Metrics
from net.metrics.watched import of_gossip, of_store, of_tiers, of_traces

ROOT = Path(__file__).resolve().parents[3]
DASHBOARD = json.loads((ROOT / "scripts/deploy/grafana.json").read_text())


@pytest.mark.parametrize("name", gendocs.PAGES)
def test_generated_pages_are_committed(name):
    assert (ROOT / name).read_text() == gendocs.PAGES[name](), "run scripts/gendocs.py"


def test_a_first_sentence_that_is_too_long_for_a_list_is_refused_and_not_cut(tmp_path):
    path = tmp_path / "window_moe.py"
    path.write_text(f'"""{"x" * (rooms.LONGEST - 10)}, (a) word (said).\nMore."""')
    assert rooms.sentence(path).endswith("x, (a) word")
    path.write_text(f'"""{"x" * (rooms.LONGEST - 9)}, (a) word."""')
    with pytest.raises(ValueError, match=f"{rooms.LONGEST + 1} characters"):
        rooms.sentence(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("FAST'25 Fig. 14: one request. More.", "FAST'25 Fig. 14: one request"),
        ("flash.h with products. More.", "flash.h with products"),
        ("WindowMoe: a layer: its parts.", "A layer: its parts"),
    ],
)
def test_a_first_sentence_keeps_figures_and_the_case_of_file_names(tmp_path, text, said):
    path = tmp_path / "window_moe.py"
    path.write_text(f'"""{text}"""')
    assert rooms.sentence(path) == said


def test_what_a_room_may_use_comes_from_the_architecture_test(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "lab/virtual").mkdir(parents=True)
    uses = "USES = {'lab': {'net', 'sched'}, 'lab.virtual': {'sched'}, 'net': set(), 'net.a.b': {'sched'}}\n"
    (tmp_path / "tests/test_architecture.py").write_text(uses)
    page = "| `lab/` | what? | old |\n| `net/` | how? | |\nsome `net/` text | a | b |\n"
    assert rooms.with_uses(tmp_path, page) == (
        "| `lab/` | what? | `net/`, `sched/`; `lab/virtual`: only `sched/` |\n"
        "| `net/` | how? | nothing; `net/a/b.py`: `sched/` |\nsome `net/` text | a | b |\n"
    )


def test_the_reader_of_errors_reads_messages(tmp_path):
    (tmp_path / "x.py").write_text(
        "FULL = 'no room'\nraise ApiError(401, f'no {key}', code='bad')\nraise UsageError('--x')\n"
        "raise bad_request(text)\nraise Other('y')\nraise Overloaded(FULL, 1.0)\nraise bad_request('z', field, 'odd')\n"
        "def one():\n    message = 'a' if b else f'{c} d'\n    raise ApiError(503, message)\n"
        "def other(message):\n    raise ApiError(500, message)\n"
    )
    assert list(refusals(tmp_path / "x.py", tmp_path)) == [
        ("401", "`bad`", "no …", "x.py"),
        ("", "", "--x", "x.py"),
        ("429", "`overloaded`", "no room", "x.py"),
        ("400", "`odd`", "z", "x.py"),
        ("503", "", "a", "x.py"),
        ("503", "", "… d", "x.py"),
    ]


def series() -> dict[str, set[str]]:
    """Every series of /metrics with its labels, as Prometheus stores them."""
    from net.metrics.transfers import LATENCY_BUCKETS_S

    metrics = Metrics("model", "node")
    row = {
        "peer": "p",
        "transport": "tcp",
        "why": "w",
        "bytes_read": 1,
        "bytes_written": 1,
        "gb_per_s": 1.0,
        "failures": 0,
    }
    row |= {"retries": 0, "latencies": [0] * (len(LATENCY_BUCKETS_S) + 1), "seconds": 0.0}
    row["rails"] = [{"rail": "r", "gb_per_s": 1.0, "up": True, "bytes": 1, "failures": 0}]
    metrics.watch_transfers(lambda: [row])
    tier = {"blocks": 1, "bytes": 1, "capacity": 1, "hits": 1}
    metrics.watch(of_gossip({"sent": (1, 1)}, lambda: {"suspicions": 1}, {"dead": 1}, float))
    metrics.watch(of_tiers(lambda: {"dram": tier}, 1))
    metrics.watch(of_store(lambda: {"corrupt": 1}))
    metrics.watch(of_traces(int, int))
    metrics.read()
    for name, metric in metrics._metrics.items():  # those with labels of their own show up with their first value
        metric.labels(*["x"] * len(metric._labelnames))
        assert name
    found: dict[str, set[str]] = {}
    for family in metrics.registry.collect():
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.mark.parametrize("panel", DASHBOARD["panels"], ids=lambda panel: panel["title"])
def test_every_metric_of_the_dashboard_exists(panel):
    known = series()
    for target in panel["targets"]:
        names = re.findall(r"(?:vllm|mooncake):\w+", target["expr"])
        assert names
        labels = set.intersection(*(known.get(name, set()) for name in names))
        assert set(names) <= set(known), set(names) - set(known)
        grouped = {label for by in re.findall(r"by \(([\w, ]+)\)", target["expr"]) for label in by.split(", ")}
        shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert (grouped | shown) <= labels, (panel["title"], labels)


def test_panels_do_not_overlap():
    cells = [(p["gridPos"]["x"] + x, p["gridPos"]["y"]) for p in DASHBOARD["panels"] for x in range(p["gridPos"]["w"])]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    assert len({p["id"] for p in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
