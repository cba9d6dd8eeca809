"""The command line: what is accepted, and that every mistake is one line with a remedy."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention import backends
from attention.cpu.level import LEVELS
from cache.block import encodings, pool_types
from cache.pool.admission import admissions
from cache.pool.policies import policies
from cache.ssd import backends as ssd_backends
from engine import __version__
from engine.config.config import Config
from engine.config.flag_values import flag_name, size
from engine.config.flags import GROUPS, UsageError, as_dict, host_port, parse, rows, show
from net.transfer.engine import transports
from sched.batching import batching_policies
from sched.membership.member import presets
from sched.placement.table import placements
from sched.queueing import queue_orders
from sched.rejection import rejections
from sched.role_ratio import role_policies
from tests.modules import ROOT


def complaint(*argv: str) -> str:
    with pytest.raises(UsageError) as caught:
        parse(argv)
    text = str(caught.value)
    assert "\n" not in text
    assert "usage:" not in text
    return text


def test_no_flags_is_the_default_config():
    assert parse([]) == Config()


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        (["--role", "prefill"], "role", "prefill"),
        (["--role", "store, decode"], "role", "store,decode"),
        (["--role", "mixed,store"], "role", "mixed"),
        (["--enable-prefix-caching"], "enable_prefix_caching", True),
        (["--no-enable-prefix-caching"], "enable_prefix_caching", False),
        (["--kv-cache-bytes", "512M"], "kv_cache_bytes", 512 << 20),
        (["--kv-cache-bytes=1.5G"], "kv_cache_bytes", 3 << 29),
        (["--kv-cache-bytes", "auto"], "kv_cache_bytes", -1),
        (["--dram-bytes", "0"], "dram_bytes", 0),
        (["--dram-bytes", "-1"], "dram_bytes", -1),
        (["--max-model-len", "auto"], "max_model_len", 0),
        (["--gpu-memory-utilization", "0.5"], "gpu_memory_utilization", 0.5),
        (["--join", "http://10.0.0.5:8000/"], "join", "10.0.0.5:8000"),
        (["--join", "[::1]:80"], "join", "[::1]:80"),
        (["--port", "1", "--port", "2"], "port", 2),
    ],
)
def test_accepted(argv, field, value):
    assert getattr(parse(argv), field) == value


@pytest.mark.parametrize(
    ("argv", "remedy"),
    [
        (["--blok-size", "4"], "did you mean --block-size?"),
        (["--max_model_len", "4"], "did you mean --max-model-len?"),
        (["--no-prefix-caching"], "did you mean --no-enable-prefix-caching?"),
        (["--block", "16"], "unknown flag --block;"),
        (["--zzz"], "--help lists the flags"),
        (["serve"], "unexpected argument 'serve'"),
        (["--block-size", "x"], "--block-size must be a whole number, not 'x'"),
        (["--block-size", "0"], "--block-size must be between 1 and 4096, not 0"),
        (["--block-size"], "--block-size needs a value, TOKENS"),
        (["--port", "99999"], "--port must be between 0 and 65535"),
        (["--gpu-memory-utilization", "nan"], "must be between 0.01 and 1.0"),
        (["--dtype", "bf16"], "did you mean bfloat16?"),
        (["--role", "prefil"], "did you mean prefill?"),
        (["--role", "prefill,"], "join several by commas"),
        (["--model", ""], "--model must not be empty"),
        (["--ssd-bytes", "5X"], "write bytes or 512M"),
        (["--enable-prefix-caching=yes"], "takes no value"),
        (["--join", "somewhere"], "is not HOST:PORT"),
        (["--join", "host:0"], "is not HOST:PORT"),
        (["--host", "0.0.0.0"], "name one of this machine"),
        (["--transport", "rdma", "--cluster-key-file", "k"], "or --rdma-plaintext for a network you trust"),
    ],
)
def test_refused_in_one_line(argv, remedy):
    assert remedy in complaint(*argv)


def test_help_names_every_field_with_group_and_default(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as done:
        parse(["--help"])
    text = re.sub(r"[ \n]+", " ", capsys.readouterr().out)
    assert done.value.code == 0
    assert all(f" {flag_name(spec.name)}" in text for spec in fields(Config))
    assert text.count("(default: ") == len(fields(Config))
    assert "--kv-cache-bytes BYTES" in text
    assert "--request-timeout-ms MS" in text


def test_version(capsys):
    with pytest.raises(SystemExit) as done:
        parse(["--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out == f"mooncake {__version__}\n"


def test_every_field_is_documented_and_grouped():
    for spec in fields(Config):
        assert spec.metadata["help"], spec.name
        assert spec.metadata["group"] in GROUPS, spec.name
    assert len(list(rows())) == len(fields(Config))


def test_show_marks_what_differs_and_hides_the_key():
    text = show(parse(["--api-key", "secret", "--block-size", "32"]))
    assert "secret" not in text
    assert " * --block-size" in text
    assert "   --port " in text
    columns = {line[4:].index("  ") for line in text.splitlines() if "--max-num-batched-tokens" in line}
    assert len(columns) == 1
    assert len(text.splitlines()) == len(fields(Config)) + len(GROUPS)


def test_as_dict_is_json_and_hides_the_key():
    values = json.loads(json.dumps(as_dict(replace(Config(), api_key="secret"))))
    assert values["api_key"] == "***"
    assert set(values) == {spec.name for spec in fields(Config)}


@given(st.integers(0, 1 << 50))
def test_sizes_of_plain_bytes_are_exact(number):
    assert size(str(number)) == number
    assert size(f"{number}K") == number << 10
    assert size(f"{number}GiB") == number << 30


@given(st.text(max_size=8))
def test_any_text_is_a_size_or_a_value_error(text):
    try:
        assert size(text) >= 0
    except ValueError as error:
        assert "512M" in str(error)


def test_host_port():
    assert host_port("[::1]:8000") == ("::1", 8000)
    assert host_port("node-7:1") == ("node-7", 1)


def test_a_mistyped_command_is_recognised():
    with pytest.raises(UsageError, match=r"unexpected argument 'expain'; did you mean explain\?"):
        parse(["expain", "x"], commands={"doctor": "", "explain": ""})


REGISTERS = {
    "attention_backend": backends,
    "batching_policy": batching_policies,
    "cache_admission": admissions,
    "cpu_level": LEVELS,
    "eviction": policies,
    "net": presets,
    "placement": placements,
    "pool_dtype": pool_types,
    "queue_order": queue_orders,
    "rejection": rejections,
    "role_policy": role_policies,
    "ssd_backend": ssd_backends,
    "transport": transports,
    "wire_dtype": encodings,
}
"""Fields of Config whose values are the entries of a register."""


def test_a_built_in_one_is_registered_in_one_place():
    """Its flag takes the values of the register: no field lists them again."""
    choices = {field.name: field.metadata["choices"] for field in fields(Config)}
    assert {name: [one for one in choices[name] if one != "auto"] for name in REGISTERS} == {
        name: list(register) for name, register in REGISTERS.items()
    }
    listed = set()
    for path in (ROOT / "engine/config").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call) and len(node.value.args) > 3:
                values = node.value.args[3]
                if isinstance(values, ast.Tuple) and all(isinstance(value, ast.Constant) for value in values.elts):
                    listed.add(ast.unparse(node.target))
    assert listed and listed.isdisjoint(REGISTERS)
