"""--peer-python: which interpreter a peer is started with."""

from argparse import ArgumentParser
from pathlib import Path

import pytest

from lab.bench.common.peer_python import add_peer_python, python_of


def parse(*argv: str):
    parser = ArgumentParser()
    add_peer_python(parser, ("vllm", "mooncake-te"), aliases=("vllm",))
    return parser.parse_args(argv)


def test_a_path_of_its_own_beats_the_one_for_all_whatever_the_order():
    for argv in (["--peer-python", "A", "--peer-python", "vllm=B"], ["--peer-python", "vllm=B", "--peer-python", "A"]):
        args = parse(*argv)
        assert python_of(args, "vllm") == Path("B") and python_of(args, "mooncake-te") == Path("A")


def test_the_old_name_is_an_alias():
    assert python_of(parse("--vllm-python", "B"), "vllm") == Path("B")
    assert python_of(parse("--vllm-python", "B"), "mooncake-te") is None


def test_the_environment_comes_last(monkeypatch):
    monkeypatch.setenv("MOONCAKE_MOONCAKE_TE_PYTHON", "E")
    assert python_of(parse(), "mooncake-te") == Path("E") and python_of(parse(), "vllm") is None
    assert python_of(parse("--peer-python", "A"), "mooncake-te") == Path("A")


@pytest.mark.parametrize("text", ["nixl=/a/bin/python", "vllm="])
def test_a_peer_that_is_not_there_is_a_clear_error(text, capsys):
    with pytest.raises(SystemExit):
        parse("--peer-python", text)
    assert "NAME one of vllm, mooncake-te" in capsys.readouterr().err
