"""The whole way of a request by RDMA: KV pushed between two node processes, tokens as if there were one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(330)
def test_kv_pushed_by_rdma_gives_the_same_tokens(tmp_path):
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("serve.py")), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=320,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout)
    got = [answer["choices"][0]["token_ids"] for answer in result["answers"]]
    assert got == result["expected"]
    prefill, decode = result["states"]
    paths = {row["peer"]: row for row in prefill["paths"]}
    assert paths["decode"]["transport"] == "rdma"
    assert paths["decode"]["reason"] == "RDMA over rxa0, rxa1"
    assert paths["decode"]["bytes_written"] > 0
    assert prefill["engine"]["integrity"] is None and decode["engine"]["integrity"] is None
