"""The decoders: what they read, which errors they may raise, and a few valid inputs to start from."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import orjson
from pydantic import ValidationError

from engine.checkpoint.gguf_file import GGUFFile
from engine.model.model_error import ModelError
from net import keyring, topology, wire
from net.errors import TransferError
from net.http.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from net.sealed_packets import PacketSeal, SealError
from net.spans import pack, pack_spans, unpack, unpack_spans
from sched.digest import CuckooDigest, Delta, DigestError, Page
from sched.load_word import Load, LoadWord
from scripts.fuzzing.gossip import GossipTarget
from sim.trace import TraceRow, read_trace, write_trace


@dataclass(frozen=True, slots=True)
class Target:
    """`decode` must return or raise one of `errors`, whatever the bytes."""

    name: str
    decode: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]
    corpus: list[bytes]


def targets(folder: Path) -> list[Target]:
    """`folder`: for decoders that read files."""
    page = LoadWord().pack() + bytes(64)
    return [
        Target("wire frames", _frames, (wire.FrameError,), _wire_corpus()),
        Target("gossip datagrams", GossipTarget().feed, (), GossipTarget.corpus()),
        Target("sealed datagrams", _sealed, (SealError,), _sealed_corpus()),
        Target("cluster key files", _key_file, (ValueError,), [b"ab" * 32]),
        Target("spans", _unpacked, (TransferError,), _spans()),
        Target("load words", LoadWord.unpack, (ValueError,), [LoadWord().pack()]),
        Target("load pages", Load.unpack, (ValueError, struct.error), [page]),
        Target("digest deltas", Delta.unpack, (DigestError,), _deltas()),
        Target("digest pages", Page.unpack, (DigestError,), _pages()),
        Target("HTTP bodies", _bodies, (orjson.JSONDecodeError, ValidationError), _http_corpus()),
        Target("topology files", _topology, (ValueError,), [b'{"numa": {"mlx5_0": 0}}', b"[numa]\nmlx5_0 = 1\n"]),
        Target("GGUF files", partial(_file, folder / "f.gguf", _gguf), (ModelError,), _gguf_corpus(folder)),
        Target("trace files", partial(_file, folder / "t.jsonl", _trace), (ValueError,), _trace_corpus(folder)),
    ]


def _frames(data: bytes) -> object:
    decoder = wire.Decoder(wire.allocate(1 << 20))
    frames, view = [], memoryview(data)
    while view:
        into = decoder.buffer()
        size = min(len(into), len(view))
        into[:size] = view[:size]
        frames += list(decoder.received(size))
        view = view[size:]
    return frames


def _wire_corpus() -> list[bytes]:
    tokens = {"t": "post", "k": "tokens", "b": {"id": "x", "n": [1, 2]}}
    return [wire.encode(tokens, [b"12345678"]), wire.encode({"t": "hello"})]


_RING = keyring.parse("cd" * 32)


def _sealed(data: bytes) -> object:
    return PacketSeal(b"s" * 12).open(_RING, data)


def _sealed_corpus() -> list[bytes]:
    seal = PacketSeal(b"t" * 12)
    return [seal.seal(_RING, b"packet"), seal.seal(_RING, bytes(300))]


def _spans() -> list[bytes]:
    return [pack([(0, 10), (20, 30)]), pack_spans([(0, 0, 10), (20, 30, 40)])]


def _digest() -> CuckooDigest:
    digest = CuckooDigest(epoch=3)
    for key in np.random.default_rng(0).integers(0, 1 << 63, 100).tolist():
        digest.add(key)
    return digest


def _deltas() -> list[bytes]:
    digest = _digest()
    return [delta.pack() for delta in iter(digest.take_delta, None)]


def _pages() -> list[bytes]:
    digest = _digest()
    while digest.take_delta() is not None:
        pass
    return [page.pack() for page in digest.pages()]


def _bodies(data: bytes) -> object:
    parsed = orjson.loads(data)
    return [kind.model_validate(parsed) for kind in (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody)]


def _http_corpus() -> list[bytes]:
    return [
        b'{"model": "m", "prompt": ["a", "b"], "max_tokens": 5, "stop": ["x"], "logit_bias": {"5": -1.5}, "n": 2}',
        b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "logprobs": true}',
        b'{"prompt": [[1, 2], [3]], "stream": true, "stream_options": {"include_usage": true}, "tokens": [1, 2, 3]}',
    ]


def _topology(data: bytes) -> object:
    text = data.decode("utf-8", "replace")
    return topology.parse(text, text.lstrip().startswith("{"))


def _key_file(data: bytes) -> object:
    return keyring.parse(data.decode("utf-8", "replace"))


def _unpacked(data: bytes) -> object:
    view = memoryview(data)
    return unpack(view), unpack_spans(view)


def _file(path: Path, read: Callable[[Path], object], data: bytes) -> object:
    path.write_bytes(data)
    return read(path)


def _gguf(path: Path) -> object:
    with GGUFFile(path) as file:
        return [file.raw(name) for name in file.tensors]


def _gguf_corpus(folder: Path) -> list[bytes]:
    import gguf

    path = folder / "seed.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "<s>"])
    writer.add_string("general.name", "tiny")
    writer.add_tensor("token_embd.weight", np.ones((3, 8), np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return [path.read_bytes()]


def _trace(path: Path) -> object:
    return list(read_trace(path))


def _trace_corpus(folder: Path) -> list[bytes]:
    path = folder / "seed.jsonl"
    write_trace(path, [TraceRow(27482.5, 6955, 52, list(range(14))), TraceRow(0.0, 5, 1, [0])])
    return [path.read_bytes()]


@dataclass(frozen=True, slots=True)
class Crash:
    """An input on which a decoder raised what it must not."""

    target: str
    seed: int
    data: bytes
    error: Exception


def fuzz(target: Target, inputs: int, seed: int) -> Crash | None:
    """`inputs` inputs, the first of them the corpus as it is; None when all were decoded or refused in good order."""
    from scripts.fuzzing.mutate import mutated

    rng = Random(seed)
    for number in range(inputs):
        data = target.corpus[number] if number < len(target.corpus) else mutated(rng, target.corpus)
        try:
            target.decode(data)
        except target.errors:
            continue
        except Exception as error:
            return Crash(target.name, seed, data, error)
    return None


def run_all(inputs: int, seed: int, done: Callable[[str], None] = lambda name: None) -> list[Crash]:
    """Every target; `done` is called after each."""
    crashes = []
    with tempfile.TemporaryDirectory() as folder:
        for target in targets(Path(folder)):
            crash = fuzz(target, inputs, seed)
            if crash is not None:
                crashes.append(crash)
            done(target.name)
    return crashes
