"""The command line of a node, generated from the fields of Config: parse it, show it.

Each field has one flag, booleans have --x and --no-x; engine/config/flag_values.py defines the notation of values. A
wrong flag or value raises UsageError, one line that names the remedy; `mooncake.main` prints it and exits with code 2.
"""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, asdict, fields, replace
from difflib import get_close_matches
from typing import Any, NoReturn

from cache.pool.policies.shares import parse as parse_shares
from cache.pool.policy import OBJECTS
from engine import __version__
from engine.config.config import ACCEPTOR, ROLES, Config
from engine.config.contradictions import contradictions
from engine.config.flag_values import flag_name, metavar, reader, spell
from engine.config.tenants import parse as parse_tenants
from sched.classes import CLASSES, with_objectives

GROUPS = {
    "node": "who this node is and where it listens",
    "model": "what is served",
    "engine": "how a step is computed",
    "cache": "where KV is kept",
    "scaling": "what nodes cost, their sites, and which start and leave with the load",
    "scheduling": "who computes what",
    "transfer": "how KV moves",
    "api": "the OpenAI-compatible HTTP API",
}


class UsageError(Exception):
    """This node cannot do what the user asked for. The message is one line and names the remedy."""

    exit_code = 2


def parse(argv: Sequence[str], others: Sequence[str] = (), commands: Mapping[str, str] | None = None) -> Config:
    """Config from command-line arguments (without the program's name).

    `others`: flags that a wrapper handles itself. `commands`: its commands with their descriptions; --help shows them,
    and errors suggest them for mistyped ones.
    `--help` and `--version` print and raise SystemExit(0); mistakes raise UsageError.
    """
    known = commands or {}
    parser = _Parser(
        prog="mooncake",
        description="One node of a Mooncake cluster. Without flags: a one-node server with the embedded model."
        + ("\n\nOther commands, each with its own --help:" if known else "")
        + "".join(f"\n  mooncake {name:<10}{text}" for name, text in known.items()),
        formatter_class=_Formatter,
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument("--version", action="version", version=f"mooncake {__version__}")
    groups = {name: parser.add_argument_group(name, text) for name, text in GROUPS.items()}
    for spec in fields(Config):
        _add(groups[spec.metadata["group"]], spec)
    try:
        values, unknown = parser.parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        raise UsageError(_explain(error)) from None
    if unknown:
        raise UsageError(_unknown(unknown, others, list(known)))
    return _validated(Config(**vars(values)))


def host_port(text: str) -> tuple[str, int]:
    """'10.0.0.5:8000' -> ('10.0.0.5', 8000); also 'http://10.0.0.5:8000/' and '[::1]:8000'. Raises UsageError."""
    match = re.fullmatch(r"(?:http://)?(\[[^\]]+\]|[^\[\]:/]+):(\d+)/?", text.strip())
    if match is None or not 0 < int(match[2]) < 65536:
        raise UsageError(f"--join {text!r} is not HOST:PORT; give the HTTP address of a running node: 10.0.0.5:8000")
    return match[1].strip("[]"), int(match[2])


def as_dict(config: Config) -> dict[str, Any]:
    """All fields, JSON-ready, for result files and metrics. The API key is masked."""
    values = asdict(config)
    if config.api_key is not None:
        values["api_key"] = "***"
    return values


def show(config: Config) -> str:
    """The configuration as an aligned table in groups; `*` marks values that differ from the default."""
    values = as_dict(config)
    width = max(len(flag_name(spec.name)) for spec in fields(Config))
    lines = []
    for group in GROUPS:
        lines.append(group)
        for spec in fields(Config):
            if spec.metadata["group"] == group:
                mark = " " if getattr(config, spec.name) == spec.default else "*"
                lines.append(f" {mark} {flag_name(spec.name):<{width}}  {spell(spec, values[spec.name])}")
    return "\n".join(lines)


def rows() -> Iterator[tuple[str, str, str, str]]:
    """(group, flag, default, help) of every field, in order: the table in docs/flags.md."""
    for spec in fields(Config):
        name = flag_name(spec.name)
        if spec.type == "bool":
            name += f" / --no-{name[2:]}"
        yield spec.metadata["group"], name, spell(spec, spec.default), spec.metadata["help"]


# --- the parser


def _add(group: argparse._ArgumentGroup, spec: Field[Any]) -> None:
    meta = spec.metadata
    text = f"{meta['help']} (default: {spell(spec, spec.default)})".replace("%", "%%")
    if spec.type == "bool":
        group.add_argument(flag_name(spec.name), action=argparse.BooleanOptionalAction, default=spec.default, help=text)
        return
    group.add_argument(
        flag_name(spec.name),
        action=_Joined if meta["several"] else "store",
        type=reader(spec),
        default=spec.default,
        help=text,
        metavar=metavar(spec),
    )


# --- constraints between fields


def _validated(config: Config) -> Config:
    role = ",".join(dict.fromkeys(part.strip() for part in config.role.split(",")))
    for part in role.split(","):
        if part not in (*ROLES, "mixed"):
            near = get_close_matches(part, (*ROLES, "mixed"), 1)
            hint = f"; did you mean {near[0]}?" if near else "; join several by commas"
            raise UsageError(f"--role must be made of {', '.join(ROLES)}, or mixed, not {part!r}{hint}")
    if "mixed" in role:
        role = ACCEPTOR if config.backend is not None else "mixed"
    config = replace(config, role=role)
    if config.weight_dtype == "auto" and config.dtype != "auto":  # a user who names a type wants it for the weights too
        config = replace(config, weight_dtype="wide")
    if (reason := next(contradictions(config), None)) is not None:
        raise UsageError(reason)
    try:
        named = parse_shares(config.cache_shares)
    except ValueError as error:
        raise UsageError(f"--cache-shares: {error}") from None
    known = (*CLASSES, OBJECTS.service_class)
    if strange := set(named) - set(known):
        raise UsageError(f"--cache-shares: no class {', '.join(sorted(strange))}; the classes are {', '.join(known)}")
    try:
        parse_tenants(config.tenants)
    except ValueError as error:
        raise UsageError(f"--tenants: {error}") from None
    try:
        with_objectives(config.slo)
    except ValueError as error:
        raise UsageError(f"--slo: {error}") from None
    if config.join is None:
        return config
    host, port = host_port(config.join)
    return replace(config, join=f"[{host}]:{port}" if ":" in host else f"{host}:{port}")


# --- errors in one line


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


class _Joined(argparse.Action):
    """The values of a flag that may be given several times."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, values if before is None else f"{before} {values}")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=min(shutil.get_terminal_size().columns, 120))

    def _format_usage(self, *args: Any, **kwargs: Any) -> str:
        return "usage: mooncake [--FLAG VALUE ...]     one command per node; flags in any order\n\n"


def _explain(error: argparse.ArgumentError) -> str:
    name = str(error.argument_name).split("/")[0]
    message = str(error.message)
    if message == "expected one argument":
        spec = next(spec for spec in fields(Config) if flag_name(spec.name) == name)
        return f"{name} needs a value, {metavar(spec)}: {spec.metadata['help']}"
    if message.startswith("ignored explicit argument"):
        return f"{name} takes no value; write {name} or --no-{name[2:]}"
    return f"{name} {message}"


def _unknown(arguments: Sequence[str], others: Sequence[str], commands: Sequence[str]) -> str:
    names = [*others, *(name for spec in fields(Config) for name in _spellings(spec))]
    wrong = next((text for text in arguments if text.startswith("-")), arguments[0]).split("=")[0]
    if not wrong.startswith("-"):
        near = get_close_matches(wrong, commands, 1)
        hint = f"did you mean {near[0]}?" if near else "every option is a --flag (mooncake --help lists them)"
        return f"unexpected argument {wrong!r}; {hint}"
    wanted = "--" + wrong.lstrip("-").replace("_", "-")
    likely = [name for name in names if name.startswith("--no-") == wanted.startswith("--no-")]
    near = get_close_matches(wanted, [*likely, "--help", "--version"], 1)
    hint = f"did you mean {near[0]}?" if near else "mooncake --help lists the flags"
    return f"unknown flag {wrong}; {hint}"


def _spellings(spec: Field[Any]) -> list[str]:
    name = flag_name(spec.name)
    return [name, f"--no-{name[2:]}"] if spec.type == "bool" else [name]
