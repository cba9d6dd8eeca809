"""Two engines read each other's blocks only if their bytes mean the same; and what the counters show."""

from __future__ import annotations

from connect.vllm.counts import MEANINGS, added, shown
from connect.vllm.identity import fingerprint, root_of


def test_every_fact_is_in_the_root():
    facts = {"dtype": "bfloat16", "block size": 128, "layout": ["LBHNC", "amx"]}
    root = root_of(facts)
    assert len(root) == 16
    assert root == root_of(dict(reversed(facts.items())))
    for name, other in (("dtype", "float32"), ("block size", 64), ("layout", ["LBHNC", "vec"])):
        assert root_of(facts | {name: other}) != root


def test_weights_in_another_folder_are_the_same_and_changed_weights_are_not(tmp_path):
    prints = set()
    for name, data in (("a", b"1" * 9000), ("b", b"1" * 9000), ("c", b"1" * 8999 + b"2"), ("d", b"1" * 9001)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(data)
        (folder / "notes.txt").write_text(name)
        prints.add(fingerprint(str(folder)))
    assert len(prints) == 3
    assert fingerprint(str(tmp_path / "a" / "model.safetensors")) in prints
    assert fingerprint("owner/model-of-a-hub") == ""


def test_counters_are_added_and_shown():
    assert added({"loads": 1, "load_us": 2500}, {"loads": 2, "waits": 1}) == {"loads": 3, "load_us": 2500, "waits": 1}
    assert shown({"loads": 3, "load_us": 2500, "waits": 0}) == {"loads": 3, "load_ms": 2.5}
    assert {"loads", "save_blocks", "lookups"} < MEANINGS.keys()
