"""Reads a node's KV events with vLLM's own classes. Runs in vLLM's environment and imports nothing of ours:

VENV/bin/python lab/foreign/events/reader.py REPLAY_ENDPOINT

It asks for all batches and prints the set of blocks that they leave, as JSON.
"""

from __future__ import annotations

import json
import sys

ANSWER_MS = 20_000


def main() -> int:
    import msgspec
    import zmq
    from vllm.distributed.kv_events import (  # type: ignore[import-not-found, unused-ignore]
        AllBlocksCleared,
        BlockRemoved,
        BlockStored,
        KVEventBatch,
    )

    decoder = msgspec.msgpack.Decoder(KVEventBatch)
    context = zmq.Context()
    replay = context.socket(zmq.DEALER)
    replay.connect(sys.argv[1])
    replay.send_multipart((b"", (0).to_bytes(8, "big")))
    held: set[int] = set()
    batches = tokens = 0
    while True:
        if not replay.poll(ANSWER_MS):
            print(f"{sys.argv[1]} does not answer", file=sys.stderr)
            return 1
        *_, number, payload = replay.recv_multipart()
        if int.from_bytes(number, "big", signed=True) < 0:
            break
        batches += 1
        for event in decoder.decode(payload).events:
            if isinstance(event, BlockStored):
                held.update(event.block_hashes)
                tokens += len(event.token_ids)
            elif isinstance(event, BlockRemoved):
                held.difference_update(event.block_hashes)
            elif isinstance(event, AllBlocksCleared):
                held.clear()
    context.destroy(linger=0)
    print(json.dumps({"batches": batches, "tokens": tokens, "held": sorted(held)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
