"""For every test: error lines fail it (complaints.py); --skip-heavy leaves it out if it is marked heavy (heavy.py);
temporary files of the processes that it starts lie under pytest's own directory, which it clears away. Full collections
of garbage do not visit what pytest has collected."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Generator, Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.complaints import no_unexpected_errors, no_unexpected_errors_at_the_end
from tests.heavy import pytest_addoption, pytest_collection_modifyitems, pytest_terminal_summary

__all__ = [
    "no_unexpected_errors",
    "no_unexpected_errors_at_the_end",
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_terminal_summary",
]

# No example may be timed: on a busy machine every example is slow.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

SOCKET_PATH_MAX = 70  # bytes: a Unix socket's path has 108, of which a private directory takes some 30


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """The whole suite's modules and tests are millions of objects that stay to the end. A full collection that visits
    them takes a second, and tests ask for thousands: simulations, checks for descriptors that are left open."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def temporary_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    place = str(tmp_path_factory.mktemp("t"))
    before, known = tempfile.tempdir, os.environ.get("TMPDIR")
    if len(place) <= SOCKET_PATH_MAX:
        os.environ["TMPDIR"], tempfile.tempdir = place, place
    yield
    tempfile.tempdir = before
    if known is None:
        os.environ.pop("TMPDIR", None)
    else:
        os.environ["TMPDIR"] = known
