"""These run inside the RDMA lab (scripts/rxe_vm.py): rxa0-rxb0 and rxa1-rxb1 are two rails, rxe0 loops back."""

import os

import pytest

IN_LAB = os.environ.get("MOONCAKE_RXE_LAB") == "1"


def pytest_collection_modifyitems(items):
    if not IN_LAB:
        for item in items:
            item.add_marker(pytest.mark.skip(reason="needs RDMA devices: run scripts/rxe_vm.py"))
