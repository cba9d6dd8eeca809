"""A trainer: puts the tensors of a safetensors file into the pool through mooncake.store, all that it has of ours.

    python trainer_program.py ADDRESS FILE PREFIX...

It puts all tensors once under each prefix, and prints the seconds of each as one JSON list.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module


def main() -> None:
    address, path, *prefixes = sys.argv[1:]
    tensors = import_module("safetensors.torch").load_file(path)
    store = import_module("mooncake.store").MooncakeDistributedStore()
    if code := store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", address):
        sys.exit(f"setup answered {code}")
    seconds = []
    for number, prefix in enumerate(prefixes):
        if number:  # other contents under each prefix
            tensors["model.norm.weight"] = tensors["model.norm.weight"] * 1.01
        begun = time.perf_counter()
        codes = store.batch_put_tensor([prefix + name for name in tensors], list(tensors.values()))
        seconds.append(time.perf_counter() - begun)
        if any(codes):
            sys.exit(f"put answered {sorted(set(codes))}")
    print(json.dumps(seconds))
    store.close()


if __name__ == "__main__":
    main()
