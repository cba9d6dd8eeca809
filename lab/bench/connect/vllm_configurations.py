"""vLLM with and without a store: what each configuration of scripts/bench.py connect-vllm starts, and its settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from lab.bench.common.client import Unreachable
from lab.conformance.record import master
from lab.foreign.common.our_pool import our_pool
from lab.foreign.common.packages import install_ours, link_upstream
from lab.foreign.common.processes import free_port
from lab.foreign.vllm.connectors import Settings, store_connector, write_store_config
from lab.foreign.vllm.own import with_own_connector

VALUE_BYTES = "3M"
"""Of a slot of ours: a block of 128 tokens of the embedded model in bfloat16 has 2.95 MB."""

SEGMENT_BYTES = 1 << 30
"""Upstream's pool: memory of each vLLM process. Ours has as much DRAM in its nodes (lab/foreign/common/our_pool.py)."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a configuration runs."""

    vllm: Path  # the interpreter that has vLLM
    upstream: Path | None  # the interpreter that has upstream's wheel
    work_dir: Path  # packages are kept here
    run_dir: Path  # logs, pools


@dataclass(frozen=True, slots=True)
class Started:
    """A configuration whose processes run, except vLLM. `settings`: of each vLLM process, by its number; `restart`: all
    its processes end and start again."""

    settings: Callable[[int], Settings]
    restart: Callable[[], None]


@contextmanager
def alone(place: Place) -> Iterator[Started]:
    """vLLM with its own prefix cache."""
    yield Started(lambda number: Settings(), lambda: None)


@contextmanager
def upstream_store(place: Place) -> Iterator[Started]:
    """Upstream's MooncakeStoreConnector on upstream's wheel: its master, and a segment in each vLLM process. Raises
    Unreachable."""
    if place.upstream is None:
        raise Unreachable("no --peer-python PATH of an interpreter that has upstream's wheel")
    packages, config = place.work_dir / "upstream", place.run_dir / "upstream.json"
    link_upstream(place.upstream, packages)
    venv, lookup = place.upstream.parent.parent, [free_port() for _ in range(16)]
    with ExitStack() as stack:

        def start() -> None:
            stack.close()
            write_store_config(config, stack.enter_context(master(venv)), SEGMENT_BYTES)

        start()
        yield Started(lambda number: store_connector(packages, config, lookup[number]), start)


@contextmanager
def our_store(place: Place) -> Iterator[Started]:
    """Upstream's MooncakeStoreConnector on our package: three store nodes, each with an SSD tier. Raises
    Unreachable."""
    packages, config = place.work_dir / "ours", place.run_dir / "ours.json"
    install_ours(place.vllm, packages)
    lookup = [free_port() for _ in range(16)]
    with our_pool(place.run_dir, VALUE_BYTES) as pool:
        write_store_config(config, pool.addresses, 0)

        def restart() -> None:
            pool.restart()
            write_store_config(config, pool.addresses, 0)

        yield Started(lambda number: store_connector(packages, config, lookup[number]), restart)


@contextmanager
def own_connector(place: Place) -> Iterator[Started]:
    """Our own connector (connect/vllm/) on three store nodes, each with an SSD tier. Raises Unreachable."""
    packages = place.work_dir / "ours"
    install_ours(place.vllm, packages)
    with our_pool(place.run_dir, VALUE_BYTES) as pool:
        yield Started(lambda number: with_own_connector(packages, pool.addresses), pool.restart)


CONFIGURATIONS: dict[str, Callable[[Place], AbstractContextManager[Started]]] = {
    "alone": alone,
    "upstream-store": upstream_store,
    "our-store": our_store,
    "own-connector": own_connector,
}
"""Name on the command line -> what it starts. A further one is one more function and line here."""

OURS = ("our-store", "own-connector")
