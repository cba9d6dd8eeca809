"""Every command of the lab refuses values that cannot be: exit code 2, and one line that names the flag."""

from __future__ import annotations

import math
import re
import sys
from argparse import Action, ArgumentParser, ArgumentTypeError
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab import flag_types
from lab.ablations.command import main as ablate
from lab.ablations.command import parser as ablation_parser
from lab.ablations.common.own_policies import check
from lab.ablations.reproduce import main as reproduce
from lab.bench import BENCHMARKS
from lab.faults import FAULTS
from lab.one_line import TerseParser
from lab.simulator.command import main as simulate
from lab.simulator.config import SimConfig
from lab.simulator.rivals.table import placements
from lab.tools import TOOLS

OTHERS = {
    "ablate": "lab.ablations.command",
    "gendocs": "lab.docs.command",
    "playground": "lab.playground.command",
    "reproduce": "lab.ablations.reproduce",
    "simulate": "lab.simulator.command",
}
COMMANDS = BENCHMARKS | FAULTS | TOOLS | OTHERS
RULES = {
    flag_types.positive: lambda value: value >= 1,
    flag_types.natural: lambda value: value >= 0,
    flag_types.port: lambda value: 0 <= value < 65_536,
    flag_types.above_zero: lambda value: 0 < value < math.inf,
    flag_types.above_zero_or_inf: lambda value: value > 0,
    flag_types.not_negative: lambda value: 0 <= value < math.inf,
    flag_types.share: lambda value: 0 <= value <= 1,
    flag_types.some_of_all: lambda value: 0 < value <= 1,
    flag_types.part: lambda value: 0 < value < 1,
    flag_types.percent: lambda value: 0 < value < 100,
}
WHOLE = (flag_types.positive, flag_types.natural, flag_types.port)
NUMBERS = st.integers().map(str) | st.floats().map(repr) | st.sampled_from(["nan", "inf", "-inf", "-0", "1e400", ""])
MADE = re.compile(r"= (argparse\.)?(Argument|Terse)Parser\(")
SIMULATED = {field.name for field in fields(SimConfig)}


class Parsing(Exception):
    """Raised in place of parsing."""


@pytest.fixture(params=COMMANDS)
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ArgumentParser:
    """The parser of a command, as its main() makes it."""
    made: list[ArgumentParser] = []

    def parse(self: ArgumentParser, *_: object) -> None:
        made.append(self)
        raise Parsing

    with monkeypatch.context() as patch:
        patch.setattr(ArgumentParser, "parse_known_args", parse)
        patch.setattr(sys, "argv", [request.param])
        with pytest.raises(Parsing):
            import_module(COMMANDS[request.param]).main()
    return made[0]


def numeric(parser: ArgumentParser) -> list[Action]:
    return [action for action in parser._actions if action.type in (int, float, *RULES)]


def test_impossible_numbers_are_refused(parser: ArgumentParser, capsys: pytest.CaptureFixture[str]) -> None:
    for action in numeric(parser):
        if action.type in (int, float) and action.dest in SIMULATED:
            continue  # below
        flag = action.option_strings[0]
        assert action.type in RULES or action.choices, f"{flag} accepts every number: use a type of lab/flag_types.py"
        for wrong in ("nan", "-1", "-inf", "1,5"):
            with pytest.raises(SystemExit) as stopped:
                parser.parse_args([f"{flag}={wrong}"])
            assert stopped.value.code == 2
            *usage, last = capsys.readouterr().err.splitlines()
            assert flag in last and wrong in last, last
            assert not (usage and isinstance(parser, TerseParser)), usage


def not_a_number(value: object) -> bool:
    """Whether NaN, or a number below zero, is in a value."""
    if isinstance(value, tuple | list):
        return any(map(not_a_number, value))
    return isinstance(value, int | float) and not value >= 0


def test_every_typed_flag_accepts_a_value_or_names_itself(
    parser: ArgumentParser, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also the types that a command has of its own: lists, pairs, names."""
    for action in parser._actions:
        action.required = False  # one flag at a time
    for action in parser._actions:
        if action.type in (None, str, Path) or action.dest in SIMULATED or not action.option_strings:
            continue
        flag = action.option_strings[0]
        for text in ("", ",", "nan", "nan,nan", "-1", "-1,-1", "1,nan", "inf", "1e999,1", "nonsense", "a=b=c", "\0"):
            try:
                found = getattr(parser.parse_known_args([f"{flag}={text}"])[0], action.dest)
            except SystemExit as stopped:
                assert stopped.code == 2
                assert flag in capsys.readouterr().err.splitlines()[-1]
            else:
                assert not not_a_number(found), f"{flag} accepts {text!r} as {found!r}"


def test_every_parser_of_the_lab_is_among_the_commands():
    """A parser is that of a command, or is made for commands that import it, or is of a program that a test or a
    benchmark starts itself."""
    root, inner = Path(flag_types.__file__).parent, {"lab.bench.transfer.agent"}
    sources = {name: Path(str(import_module(name).__file__)).read_text() for name in set(COMMANDS.values())}
    for path in sorted(root.rglob("*.py")):
        module = ".".join(("lab", *path.relative_to(root).with_suffix("").parts))
        if not MADE.search(path.read_text()) or module in inner or module in sources:
            continue
        assert any(module in text for text in sources.values()), f"{module} has a parser, but is no command"


@given(st.sampled_from(list(RULES)), NUMBERS)
def test_a_type_accepts_what_its_rule_allows(kind, text):
    try:
        value = (int if kind in WHOLE else float)(text)
        allowed = RULES[kind](value) and (kind not in WHOLE or value <= flag_types.MOST)
    except ValueError:
        allowed = False
    if allowed:
        assert kind(text) == value
    else:
        with pytest.raises(ArgumentTypeError, match="must be"):
            kind(text)


def test_names_are_those_that_there_are():
    names = flag_types.names_of("full", "freeze")
    assert names("freeze,full") == "freeze,full"
    for wrong in ("", "freez", "full,", "full, freeze"):
        with pytest.raises(ArgumentTypeError, match="is none of full, freeze"):
            names(wrong)


def test_a_result_goes_into_a_file(tmp_path):
    """Found out before the run: after it the result would be lost."""
    (tmp_path / "file").touch()
    for good in ("file", "new", "new/folder/file"):
        assert flag_types.file_to_write(str(tmp_path / good)) == tmp_path / good
    for wrong in ("", str(tmp_path), str(tmp_path / "file" / "below")):
        with pytest.raises(ArgumentTypeError, match="must be"):
            flag_types.file_to_write(wrong)


NUMERIC = [field for field in fields(SimConfig) if type(field.default) in (int, float)]


@pytest.mark.parametrize("field", NUMERIC, ids=lambda field: field.name)
def test_the_simulator_refuses_impossible_numbers(field, capsys):
    flag = "--" + field.name.replace("_", "-")
    for text in ["-1"] if type(field.default) is int else ["-1", "nan", "-inf"]:
        assert flag in refused(simulate, [f"{flag}={text}", "--requests", "1"], capsys)


@pytest.mark.parametrize(
    "wrong",
    [
        {"gossip_s": 0.0}, {"digest_s": 0.0}, {"retry_s": 0.0}, {"block_tokens": 0}, {"decode": 0}, {"prefill": 0},
        {"gossip_loss": 1.0}, {"entry_skew": 1.5}, {"kv_scale": 0.0}, {"kv_scale": math.inf}, {"max_waiting": 0},
        {"slo": "interactive:ttft=nan"}, {"slo": "interactive:tbt=-1"}, {"slo": "nobody:ttft=1"},
    ],
    ids=str,
)  # fmt: skip
def test_the_simulator_refuses_what_would_hang_or_mean_nothing(wrong, capsys):
    ((name, value),) = wrong.items()
    flag = "--" + name.replace("_", "-")
    assert flag in refused(simulate, [f"{flag}={value}", "--requests", "1"], capsys)


NAMES = {
    "placement": ["nonsense", "missing.py:X"], "queue-order": ["nonsense"], "eviction": ["nonsense", "missing.py"],
    "rejection": ["nonsense"], "batching-policy": ["nonsense"], "cache-admission": ["nonsense"],
}  # fmt: skip
SIMULATED_NAMES = NAMES | {
    "gossip-model": ["nonsense"], "pool-model": ["nonsense"], "model": ["nonsense"],
    "model-geometry": ["nonsense"], "links": ["nonsense"], "step-models": ["nonsense"], "output-lengths": ["nonsense"],
    "predictor": ["nonsense"], "kv-overlap": ["nonsense"], "publish": ["nonsense"], "generate": ["nonsense"],
    "faults": ["boom", "crash:nobody@1+1", "slow:prefill-0@1+1", "crash:prefill-0@1+0"], "slo": ["interactive:ttft"],
    "hardware": ["nonsense"], "trace": ["missing.jsonl", __file__], "flow-order": ["nonsense", "deadline"],
    "fat-tree": ["nonsense", "4x4", "0x1x1", "2x2x2:x", "2x2x2:nan"], "role-policy": ["nonsense"],
    "node-classes": ["nonsense", "store:1:1:1", "prefill:1:0:1", "prefill:-1:1:1", "decode:1:1:1,decode:1:1:1"],
    "autoscale": ["nonsense", "store=1..2", "prefill=3..2", "prefill=20..30"], "migration": ["nonsense"],
}  # fmt: skip


def refused(main, argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The only line that main() prints."""
    try:
        code = main(argv)
    except SystemExit as stopped:
        code = stopped.code
    told = capsys.readouterr()
    assert (code, told.out) == (2, "") and told.err.count("\n") == 1 and told.err.endswith("\n"), told
    return told.err


def test_every_flag_with_a_name_has_a_row():
    names = {field.name.replace("_", "-") for field in fields(SimConfig) if isinstance(field.default, str)}
    assert names <= set(SIMULATED_NAMES)


@pytest.mark.parametrize(("flag", "value"), [(flag, one) for flag, all_ in SIMULATED_NAMES.items() for one in all_])
def test_the_simulator_refuses_unknown_names(flag, value, capsys):
    assert f"--{flag}" in refused(simulate, [f"--{flag}={value}", "--requests", "1", "--prefill", "2"], capsys)


@pytest.mark.parametrize(("flag", "value"), [(flag, one) for flag, all_ in NAMES.items() for one in all_])
@pytest.mark.parametrize("main", [ablate, reproduce], ids=["ablate", "reproduce"])
def test_ablations_and_reports_refuse_unknown_names(main, flag, value, capsys, tmp_path):
    few = ["--quick", "--out", str(tmp_path / "report")] if main is reproduce else ["overlap"]
    argv = [*few, "--requests", "1", "--seeds", "1", "--workers", "1", f"--{flag}={value}"]
    assert f"--{flag}" in refused(main, argv, capsys)
    assert not (tmp_path / "report").exists(), "nothing was run"


def test_a_refusal_says_what_was_given(capsys):
    """On one line in a narrow terminal too; `:-1:` and `:X:` are emoji to rich, and `[1]` is markup."""
    for flag, value in (
        ("node-classes", "prefill:-1:1:1"), ("placement", "missing.py:X"), ("placement", "[1]" * 40), ("slo", "a:b=[1]")
    ):  # fmt: skip
        assert value in refused(simulate, [f"--{flag}={value}", "--requests", "1"], capsys)


@pytest.mark.parametrize("placement", placements)
def test_every_built_in_placement_is_accepted_where_a_users_policies_are(placement):
    check(ablation_parser().parse_args([f"--placement={placement}"]))
