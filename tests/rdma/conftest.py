"""These run inside the RDMA lab (scripts/tools.py rdma-vm): rxa0-rxb0 and rxa1-rxb1 are two rails, rxe0 loops back."""

import os
from pathlib import Path

import pytest

IN_LAB = os.environ.get("MOONCAKE_RXE_LAB") == "1"
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    """Called with every test of the run, not with ours alone."""
    for item in items:
        if not IN_LAB and HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs RDMA devices: run scripts/tools.py rdma-vm"))
