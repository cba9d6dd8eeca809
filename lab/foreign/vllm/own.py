"""The settings of vLLM with our own connector, and what its metrics say."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from lab.bench.common.client import Unreachable
from lab.foreign.common.processes import get
from lab.foreign.vllm.connectors import ALONE, Settings

MODULE, CLASS = "mooncake.vllm_connector", "PoolConnector"


def with_own_connector(packages: Path, nodes: str, role: str = "kv_both", *flags: str, **options: Any) -> Settings:
    """PoolConnector. `packages`: the folder that has our package; `nodes`: HOST:PORT of store nodes, separated by
    commas; `flags`: more of vLLM; `options`: more of the connector (docs/connect/vllm-connector.md)."""
    transfer = {
        "kv_connector": CLASS,
        "kv_connector_module_path": MODULE,
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"master": nodes, **options},
    }
    return Settings((*ALONE, *flags, "--kv-transfer-config", json.dumps(transfer)), {"PYTHONPATH": str(packages)})


def metrics(url: str) -> Counter[str]:
    """See `sums`. Raises Unreachable."""
    text = get(f"{url}/metrics")
    if text is None:
        raise Unreachable(f"{url}/metrics does not answer")
    return sums(text.decode())


def sums(text: str) -> Counter[str]:
    """vLLM's metrics, each summed over its labels; those with a source are 'NAME SOURCE'."""
    found: Counter[str] = Counter()
    for line in text.splitlines():
        if line.startswith("vllm:"):
            labelled, _, value = line.rpartition(" ")
            name, _, labels = labelled.partition("{")
            if source := re.search(r'source="(\w+)"', labels):
                name += " " + source[1]
            found.update({name: float(value)})
    return found
