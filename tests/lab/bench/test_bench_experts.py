"""scripts/bench.py experts: its flags, and what it keeps."""

import json

import pytest

from lab.bench.experts import command


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--ranks", "1"], "--ranks 1: at least 2"),
        (["--ranks", "3"], "--ranks 3: at least 2, which have equal numbers of the 64 --experts"),
        (["--top-k", "65"], "--top-k 65: there are 64 --experts"),
    ],
)
def test_ranks_that_cannot_share_the_experts_are_refused(flags, said, capsys):
    with pytest.raises(SystemExit) as end:
        command.main(flags)
    assert end.value.code == 2 and said in capsys.readouterr().err


def test_what_was_measured_before_ranks_fail_is_kept(tmp_path, monkeypatch, capsys):
    def measure(ranks, cases, rounds):
        if ranks == 4:
            raise RuntimeError("ranks [3] failed")
        return [[case, {"ours": [1e-6], "gloo": [4e-6], "memcpy": [1e-6]}, 4096] for case in cases]

    monkeypatch.setattr(command, "measure", measure)
    out = tmp_path / "out.json"
    flags = ["--ranks", "2", "4", "--tokens", "1", "--hidden", "2048", "--json", str(out)]
    assert command.main(flags) == 1
    rows = json.loads(out.read_bytes())["rows"]
    assert [row["case"] for row in rows] == ["ranks=2 tokens=1 hidden=2048 top_k=8"] * 2
    assert "bench.py experts: 4 ranks: ranks [3] failed" in capsys.readouterr().err
