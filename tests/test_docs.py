"""README and docs/ hold: files they name exist, links resolve, commands they show take the flags shown."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from engine.config.flags import UsageError, parse, rows
from lab.bench import BENCHMARKS
from lab.faults import FAULTS
from lab.launch.up import OWN_FLAGS
from lab.planning import PLANS
from lab.tools import TOOLS

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ROOMS = "attention|cache|connect|docs|engine|lab|net|sched|scripts|tests|\\.ci"
OF_OTHERS = (
    "backends.md",
    "clients.md",
    "launchers.md",
    "lmcache.md",
    "sglang.md",
    "vllm.md",
    "vllm-connector.md",
)  # show command lines of other programs
COMMANDS = ("doctor", "drain", "expert-rank", "explain", "top")  # of mooncake.py
TABLES = {
    "scripts/bench.py": BENCHMARKS,
    "scripts/faults.py": FAULTS,
    "scripts/plan.py": PLANS,
    "scripts/tools.py": TOOLS,
}
WITH_PEERS = ("connect", "connect-vllm", "engine", "store", "transfer")
"""Benchmarks that start programs of others, each in an interpreter of its own."""

SINGLE = {
    "scripts/ablate.py": "lab.ablations.command",
    "scripts/gendocs.py": "lab.docs.command",
    "scripts/playground.py": "lab.playground.command",
    "scripts/reproduce.py": "lab.ablations.reproduce",
    "scripts/simulate.py": "lab.simulator.command",
}
MODULES = SINGLE | {f"{script} {name}": found[name] for script, found in TABLES.items() for name in found}
of_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)

HELP = """
import contextlib, io, json, sys
from importlib import import_module
found = {}
for script, module in json.loads(sys.argv[1]).items():
    sys.argv = [script, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            import_module(module).main()
            code = "returned"
        except SystemExit as end:
            code = end.code
    found[script] = [code, out.getvalue()]
print(json.dumps(found))
"""


def spans(text: str) -> Iterator[str]:
    """Every `code span` outside fences."""
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def shell_lines(text: str) -> Iterator[str]:
    """Every line of the fenced shell examples, continued ones joined."""
    for block in re.findall(r"```(?:sh|bash|console)\n(.*?)```", text, re.DOTALL):
        yield from (line for line in block.replace("\\\n", " ").splitlines() if line.strip())


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """(program, arguments) of every example that runs a program of this repository."""
    for line in [*shell_lines(text), *spans(text)]:
        try:
            words = shlex.split(line.removeprefix("$ "), comments=True)
        except ValueError:  # an apostrophe in a code span that is no command
            continue
        while words and re.fullmatch(r"python3?|\.venv/bin/python|[A-Z_]+=.*", words[0]):
            words = words[1:]
        if words and re.fullmatch(r"mooncake\.py|(scripts|\.ci)/[\w/]+(\.py)?", words[0]):
            if (words[0] == "mooncake.py" and words[1:2] and words[1] in COMMANDS) or words[0] in TABLES:
                yield " ".join(words[:2]), words[2:]
            else:
                yield words[0], words[1:]


@cache
def helps() -> dict[str, str]:
    """Every Python script with a command line -> what its --help prints; one process imports what they share once."""
    done = subprocess.run(
        [sys.executable, "-c", HELP, json.dumps(MODULES)], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert {script: code for script, (code, _) in found.items() if code not in (0, None)} == {}
    return {script: text for script, (_, text) in found.items()}


@cache
def of_the_command(name: str) -> str:
    command = [sys.executable, "mooncake.py", name, "--help"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout


def flags_of(program: str) -> set[str]:
    node = {flag for _, names, _, _ in rows() for flag in names.split(" / ")} | {"--help", "--version"}
    if program == "mooncake.py":
        return node
    if program == "scripts/up":
        return node | set(OWN_FLAGS)
    if program == "mooncake.py doctor":
        return node | set(re.findall(r"--[a-z][\w-]*", of_the_command("doctor")))
    if program.startswith("mooncake.py "):
        return set(re.findall(r"--[a-z][\w-]*", of_the_command(program.split()[1])))
    if program in helps():
        source = Path(import_module(MODULES[program]).__file__ or "").read_text()
        own = re.findall(r'add_argument\(\s*"(--[\w-]+)"', source)  # of its subcommands too
        return {*re.findall(r"--[a-z][\w-]*", helps()[program]), *own, "--help"}
    return set(re.findall(r"--[a-z][\w-]*", (ROOT / program).read_text()))  # a shell script


STARTED_BY_OTHERS = {
    "lab.bench.collectives.rank_program",
    "lab.bench.connect.client_program",
    "lab.bench.connect.engine_program",
    "lab.bench.experts.rank_program",
    "lab.bench.transfer.agent",
    "lab.bench.weights.trainer_program",
    "lab.clients.libraries.run",
    "lab.clients.openai_checks",
    "lab.conformance.engine_cases",
    "lab.conformance.store_cases",
    "lab.conformance.tensor_cases",
    "lab.faults.put_client",
    "lab.faults.networks.relay",
    "lab.foreign.events.reader",
    "lab.launch.duty",
    "lab.launch.up",
}
"""Programs that another command starts in a process of their own; scripts/up is a shell script."""


def test_every_command_of_the_lab_can_be_called():
    found = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in (ROOT / "lab").rglob("*.py")
        if re.search(r"^(async )?def main\(", path.read_text(), re.MULTILINE)
    }
    assert STARTED_BY_OTHERS <= found <= set(MODULES.values()) | STARTED_BY_OTHERS


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_has_the_common_flags(name):
    """--quick and --json; where it starts peers, --peer-python."""
    told = set(re.findall(r"^  (--[a-z][\w-]*)", helps()[f"scripts/bench.py {name}"], re.MULTILINE))
    assert {"--quick", "--json"} <= told
    assert ("--peer-python" in told) == (name in WITH_PEERS)


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_has_the_common_flags(name):
    told = set(re.findall(r"^  (--[a-z][\w-]*)", helps()[f"scripts/faults.py {name}"], re.MULTILINE))
    assert {"--quick", "--json"} <= told


@of_page
def test_every_file_it_names_exists(page):
    named = [match[1] for span in spans(page.read_text()) if (match := re.match(rf"((?:{ROOMS})/[\w./-]*)", span))]
    assert [path for path in named if not (ROOT / path).exists()] == []


@of_page
def test_its_links_resolve(page):
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path.read_text()), target


def anchors(text: str) -> set[str]:
    """As GitHub makes them of headings."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@of_page
def test_its_commands_take_their_flags(page):
    for program, arguments in commands(page.read_text()):
        assert (ROOT / program.split()[0]).exists(), program
        given = {word.partition("=")[0] for word in arguments if word.startswith("--") and word != "--"}
        if given:
            assert given <= flags_of(program), f"{program} has no {given - flags_of(program)}"


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in OF_OTHERS], ids=lambda page: page.name)
def test_every_flag_it_names_is_some_programs(page):
    scripts = ("scripts/up", "scripts/setup", "scripts/test", ".ci/run")
    programs = [*helps(), "mooncake.py", *scripts, *(f"mooncake.py {name}" for name in COMMANDS)]
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", page.read_text()))
    assert named - set().union(*(flags_of(program) for program in programs)) == set()


@of_page
def test_its_node_commands_parse(page):
    """Values too, as far as they can be told without a machine."""
    for program, arguments in commands(page.read_text()):
        if program == "mooncake.py" and "..." not in arguments:
            try:
                parse([word for word in arguments if word not in ("--help", "--version")])
            except UsageError as error:
                pytest.fail(f"{' '.join(arguments)}: {error}")


def test_the_examples_are_found():
    """These tests cannot pass by finding nothing."""
    found = list(commands(PAGES[0].read_text()))
    programs = {program for program, _ in found}
    assert {"scripts/up", "mooncake.py", "mooncake.py top", "mooncake.py drain", "scripts/test"} <= programs
    assert ["--role", "store"] in [arguments[:2] for program, arguments in found if program == "mooncake.py"]
    assert len(helps()) > 30
