"""The whole way of a request by RDMA: KV pushed, or pulled, between two node processes; tokens as if there were one.
And encoded KV (--wire-dtype) between two codecs; the other transports have tests/engine/handoff/test_wire.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KV_BYTES = (60 + 99) * 3 * 2 * 2 * 16 * 4  # of the prompts of serve.py: tokens, layers, K and V, heads, size, float32


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """What tests/rdma/serve.py prints: both clusters, one after the other in one process, then the codecs."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("serve.py")), str(tmp_path_factory.mktemp("serve"))],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=1500,  # of the guest, whose clock runs fast where the host is busy; the lab has a limit of its own
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.timeout(1600)
@pytest.mark.parametrize("how", ["push", "pull"])
def test_kv_moved_by_rdma_gives_the_same_tokens(served, how):
    got = [answer["choices"][0]["token_ids"] for answer in served[how]["answers"]]
    assert got == served["expected"]
    prefill, decode = served[how]["states"]
    mover, other = (prefill, "decode") if how == "push" else (decode, "prefill")
    path = {row["peer"]: row for row in mover["paths"]}[other]
    assert path["transport"] == "rdma"
    assert path["reason"] == ("RDMA over rxa0, rxa1" if how == "push" else "RDMA over rxb0, rxb1")
    assert path["bytes_written" if how == "push" else "bytes_read"] >= KV_BYTES
    assert prefill["engine"]["integrity"] is None and decode["engine"]["integrity"] is None


@pytest.mark.timeout(1600)
@pytest.mark.parametrize("how", ["push", "pull"])
def test_encoded_kv_moves_by_rdma(served, how):
    moved = served["encoded"][how]
    assert moved["transport"] == "rdma" and moved["bytes"] > 0 and moved["saved"] > 0
