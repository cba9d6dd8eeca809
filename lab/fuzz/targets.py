"""The decoders: their inputs, the errors that they may raise, and a few valid inputs to start from."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import orjson
from pydantic import BaseModel, ValidationError

from cache.ssd.lmdb_pages import Pages, Run, check_value
from cache.ssd.medium import Damaged
from engine.checkpoint.gguf.file import GGUFFile
from engine.model.model_error import ModelError
from lab.fuzz.claims import ClaimsTarget, IntentsTarget
from lab.fuzz.coded import CodedTarget
from lab.fuzz.gossip import GossipTarget
from lab.fuzz.leases import LeasesTarget
from lab.fuzz.messages import bodies_corpus, read_body, read_updates, updates_corpus
from lab.loads.trace import TraceRow, read_trace, write_trace
from net import bodies
from net.bodies import BodyError
from net.channel import keyring, wire
from net.codec.exponents import CodecError
from net.errors import RemoteError, TransferError
from net.gossip.sealed_packets import PacketSeal, SealError
from net.http.anthropic.schema import CountBody, MessagesBody
from net.http.openai.responses_schema import ResponsesBody
from net.http.openai.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from net.rounds.rdma.mirror import Side
from net.transfer.common import topology
from net.transfer.common.spans import pack, pack_spans, unpack, unpack_spans
from net.transfer.rdma.endpoint import Endpoint
from sched.gossip.digest import CuckooDigest, Delta, DigestError, Page
from sched.gossip.load_word import Load, LoadWord

UNREADABLE = (orjson.JSONDecodeError, BodyError)


@dataclass(frozen=True, slots=True)
class Target:
    """`decode` must return or raise one of `errors` for any bytes."""

    name: str
    decode: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]
    corpus: list[bytes]


def targets(folder: Path) -> list[Target]:
    """`folder`: files for decoders that read files."""
    page = LoadWord().pack() + bytes(64)
    return [
        Target("wire frames", _frames, (wire.FrameError,), _wire_corpus()),
        Target("coded frames", CodedTarget().feed, (CodecError,), CodedTarget.corpus()),
        Target("gossip datagrams", GossipTarget().feed, (), GossipTarget.corpus()),
        Target("updates of requests", read_updates, UNREADABLE, updates_corpus()),
        Target("queue pairs of ranks", _side, UNREADABLE, _sides()),
        Target("bodies of messages", read_body, UNREADABLE, bodies_corpus()),
        Target("claims on blocks", IntentsTarget().feed, (ValueError, RemoteError), [*IntentsTarget.corpus]),
        Target("claims on work", ClaimsTarget().feed, (ValueError, RemoteError), [*ClaimsTarget.corpus]),
        Target("leases", LeasesTarget().feed, (ValueError,), [*LeasesTarget.corpus]),
        Target("sealed datagrams", _sealed, (SealError,), _sealed_corpus()),
        Target("cluster key files", _key_file, (ValueError,), [b"ab" * 32]),
        Target("spans", lambda data: unpack(memoryview(data)), (TransferError,), [pack([(0, 10), (20, 30)])]),
        Target("spans of arenas", lambda data: unpack_spans(memoryview(data)), (TransferError,), [_of_arenas()]),
        Target("load words", LoadWord.unpack, (ValueError,), [LoadWord().pack()]),
        Target("load pages", Load.unpack, (ValueError, struct.error), [page]),
        Target("digest deltas", Delta.unpack, (DigestError,), _deltas()),
        Target("digest pages", Page.unpack, (DigestError,), _pages()),
        *(
            Target(name, partial(_body, kind), (orjson.JSONDecodeError, ValidationError), bodies)
            for name, (kind, bodies) in HTTP.items()
        ),
        Target("topology files", _topology, (ValueError,), [b'{"numa": {"mlx5_0": 0}}', b"[numa]\nmlx5_0 = 1\n"]),
        Target("GGUF files", partial(_file, folder / "f.gguf", _gguf), (ModelError,), _gguf_corpus(folder)),
        Target("LMDB files", partial(_file, folder / "l.mdb", _lmdb), (Damaged, OSError), _lmdb_corpus(folder)),
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


def _side(data: bytes) -> object:
    return bodies.decode(Side, orjson.loads(data))


def _sides() -> list[bytes]:
    endpoint = Endpoint(17, 3_000_000, "fe80" + "00" * 14, 1, 5, 16, 16)
    return [orjson.dumps(bodies.encode(Side(endpoint, 1 << 46, 1 << 20, 4_000_000_000)))]


def _of_arenas() -> bytes:
    return pack_spans([(0, 0, 10), (20, 30, 40)])


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


def _body(kind: type[BaseModel], data: bytes) -> object:
    body = kind.model_validate(orjson.loads(data))
    if isinstance(body, ResponsesBody | MessagesBody | CountBody):
        with suppress(ValueError):  # what their routes answer with 400
            return body.as_chat() if isinstance(body, MessagesBody) else body.chat()
    with suppress(ValueError):  # what net/http/openai/plan.py answers with 400
        return body, getattr(body, "structure", None), getattr(body, "forced", None)
    return body


HTTP: dict[str, tuple[type[BaseModel], list[bytes]]] = {
    "completion bodies": (CompletionBody, [
        b'{"model": "m", "prompt": ["a", "b"], "max_tokens": 5, "stop": ["x"], "logit_bias": {"5": -1.5}, "n": 2}',
        b'{"prompt": [[1, 2], [3]], "stream": true, "stream_options": {"include_usage": true}}',
        b'{"prompt": "a", "echo": true, "logprobs": 2, "guided_regex": "[ab]+", "best_of": 1, "priority": -1}',
    ]),
    "chat bodies": (ChatBody, [
        b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "logprobs": true}',
        b'{"messages": [{"role": "tool", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]'
        b'}], "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}], "tool_choice": "required"}',
        b'{"messages": [{"role": "user"}], "response_format": {"type": "json_schema", "json_schema": {"name": "a", '
        b'"schema": {"type": "object"}}}, "prompt_logprobs": 1}',
    ]),
    "tokenize bodies": (TokenizeBody, [
        b'{"prompt": "a", "return_token_strs": true}', b'{"messages": [{"role": "user", "content": "a"}], "tools": []}',
    ]),
    "responses bodies": (ResponsesBody, [
        b'{"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]}, {"type": '
        b'"function_call", "call_id": "c", "name": "f", "arguments": "{}"}, {"type": "function_call_output", "call_id":'
        b' "c", "output": "x"}], "tools": [{"type": "function", "name": "f", "parameters": {}}]}',
        b'{"input": "a", "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}}, '
        b'"tool_choice": {"type": "function", "name": "f"}, "instructions": "b", "reasoning": {"effort": "low"}}',
    ]),
    "messages bodies": (MessagesBody, [
        b'{"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "i", "name": "f", "input": {}}]}, '
        b'{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "i", "content": "x"}, {"type": "text", '
        b'"text": "a"}]}], "max_tokens": 5, "system": [{"type": "text", "text": "s"}], "stop_sequences": ["x"]}',
    ]),
    "count bodies": (CountBody, [
        b'{"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "f", "input_schema": {}}], '
        b'"tool_choice": {"type": "tool", "name": "f"}}',
    ]),
    "detokenize bodies": (DetokenizeBody, [b'{"tokens": [1, 2, 3], "model": "m"}']),
}  # fmt: skip


def _topology(data: bytes) -> object:
    text = data.decode("utf-8", "replace")
    return topology.parse(text, text.lstrip().startswith("{"))


def _key_file(data: bytes) -> object:
    return keyring.parse(data.decode("utf-8", "replace"))


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


def _lmdb(path: Path) -> object:
    """Read the file like the SSD tier does before LMDB opens it."""
    with path.open("rb") as file:
        pages = Pages(file.fileno())
        found = [pages.database(name) for name in ("blocks", "index")]
        pages.finish()
        for _, value, _ in found[0]:
            if isinstance(value, Run):
                check_value(file.fileno(), value)
        return found


def _lmdb_corpus(folder: Path) -> list[bytes]:
    import lmdb

    corpus = []
    for count in (3, 150):  # one leaf; a branch over several leaves
        path = folder / f"lmdb-{count}"
        with lmdb.open(str(path), map_size=8 << 20, max_dbs=2, sync=False) as env:
            names = [env.open_db(name) for name in (b"blocks", b"index")]
            with env.begin(write=True) as txn:
                for i in range(count):
                    key = i.to_bytes(16, "big")
                    txn.put(key, bytes(3000 if i < 3 else 40), db=names[0])
                    txn.put(key, bytes(24), db=names[1])
            with env.begin(write=True) as txn:  # leaves free pages
                txn.delete((1).to_bytes(16, "big"), db=names[0])
        corpus.append((path / "data.mdb").read_bytes())
    return corpus


def _trace(path: Path) -> object:
    return list(read_trace(path))


def _trace_corpus(folder: Path) -> list[bytes]:
    path = folder / "seed.jsonl"
    extended = TraceRow(1.0, 600, 3, [0, 7], "batch", site=1, session=4)
    write_trace(path, [TraceRow(27482.5, 6955, 52, list(range(14))), TraceRow(0.0, 5, 1, [0]), extended])
    return [path.read_bytes()]


@dataclass(frozen=True, slots=True)
class Crash:
    """An input on which a decoder raised an undeclared error."""

    target: str
    seed: int
    data: bytes
    error: Exception


def fuzz(target: Target, inputs: int, seed: int) -> Crash | None:
    """Try `inputs` inputs, first the unchanged corpus; None if all were decoded or refused correctly."""
    from lab.fuzz.mutate import mutated

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
    """Fuzz every target; `done` is called after each."""
    crashes = []
    with tempfile.TemporaryDirectory() as folder:
        for target in targets(Path(folder)):
            crash = fuzz(target, inputs, seed)
            if crash is not None:
                crashes.append(crash)
            done(target.name)
    return crashes
