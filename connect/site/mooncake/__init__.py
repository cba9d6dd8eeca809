"""Upstream Mooncake's Python names, on our nodes: mooncake.store, mooncake.engine, mooncake.pg and others.

Files:
    engine           mooncake.engine: connect/engine/transfer_engine.py under upstream's name
    mooncake_config  mooncake.mooncake_config: connect/store/settings.py under upstream's name
    pg               mooncake.pg: connect/process_group/ under upstream's name; its import registers the backends of
                     torch.distributed
    store            mooncake.store: connect/store/distributed_store.py under upstream's name
    vllm_connector   mooncake.vllm_connector: connect/vllm/connector.py under a short name, for vLLM's
                     kv_connector_module_path
"""

from __future__ import annotations

import warnings
from pathlib import Path

if list(Path(__file__).parent.glob("store*.so")):
    warnings.warn(
        "the package mooncake-transfer-engine is installed in the same place, so `import mooncake.store` loads its "
        "library and not mooncake-serve's module: uninstall one of the two, then install the other again",
        RuntimeWarning,
        stacklevel=2,
    )
