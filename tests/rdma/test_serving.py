"""The whole way of a request by RDMA: KV pushed between two node processes, tokens as if there were one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(250)
def test_kv_pushed_and_pulled_by_rdma_gives_the_same_tokens(tmp_path):
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("serve.py")), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout)
    for how in ("push", "pull"):
        assert result["answers"][how]["choices"][0]["token_ids"] == result["expected"][how], how
    for how, moved, submitter, peer in (
        ("push", "bytes_written", 0, "decode"),
        ("pull", "bytes_read", 1, "prefill-pull"),
    ):
        states = result["states"][how]
        path = {row["peer"]: row for row in states[submitter]["paths"]}[peer]
        assert (path["transport"], path["reason"].partition(" over ")[0]) == ("rdma", "RDMA")
        assert len(path["rails"]) == 2 and path[moved] > 0, (how, path)
        assert [state["engine"]["integrity"] for state in states] == [None, None]
