import sys

from engine.checkpoint.progress import Progress


def test_a_log_gets_ten_lines_at_most(caplog):
    progress = Progress()
    with caplog.at_level("INFO", "mooncake.node"):
        for done in range(1001):
            progress(done, 1000)
    assert [record.getMessage() for record in caplog.records] == [f"loading weights: {p} %" for p in range(10, 101, 10)]


def test_a_terminal_gets_one_line_that_ends(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    progress = Progress()
    for done in (0, 1, 5, 5, 10):
        progress(done, 10)
    text = capsys.readouterr().err
    assert text.count("\r") == 3 and text.count("\n") == 1
    assert text.endswith("[####################] 100 %\n")
