"""MooncakeDistributedStore: upstream's store calls, answered by our pool. docs/connect.md lists what differs.

Every call waits; any thread may make it. Codes are those of connect/store/codes.py: 0 or a number of bytes on success.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from typing import Any

from cache.arena import Buffer
from connect.common.raw_memory import Pieces, blank_bytes
from connect.store import arguments, codes
from connect.store.client import Client, answering, answers_code, answers_codes
from connect.store.registered import Registered
from connect.store.replicas import Replica
from connect.store.replicate_config import ReplicateConfig
from connect.store.sessions import ReadSessions, WriteSessions
from connect.store.settings import Setup
from connect.store.tensor_calls import TensorCalls

PLAIN = ReplicateConfig()


class BufferHandle(bytearray):
    """A value in memory of this process, with the buffer protocol."""

    def ptr(self) -> int:
        """Its address."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self))

    def size(self) -> int:
        """Bytes."""
        return len(self)


class MooncakeDistributedStore(TensorCalls):
    """One client of the pool. Calls for tensors: connect/store/tensor_calls.py."""

    def __init__(self) -> None:
        self._client = Client()
        self._registered = Registered()
        self._reads = ReadSessions(self._fetch)
        self._writes = WriteSessions()

    # --- life

    @answers_code
    def setup(
        self,
        local_hostname: str | dict[str, Any],
        metadata_server: str = "P2PHANDSHAKE",
        global_segment_size: int | str = 0,
        local_buffer_size: int | str = 0,
        protocol: str = "tcp",
        rdma_devices: str = "",
        master_server_addr: str | None = None,
        engine: Any = None,
        enable_ssd_offload: bool = False,
        ssd_offload_path: str = "",
        tenant_id: str = "default",
        enable_client_http_server: bool = False,
        client_http_port: int = 9300,
    ) -> int:
        """Enter the pool through `master_server_addr`: HOST:PORT of any node, several separated by commas, or "": a
        node on this host, which is started if there is none. A dict holds the same by name."""
        if isinstance(local_hostname, dict):
            given = local_hostname
        else:
            given = {
                "local_hostname": arguments.text(local_hostname, "local_hostname"),
                "global_segment_size": global_segment_size,
                "master_server_addr": arguments.text(master_server_addr, "master_server_addr"),
                "tenant_id": tenant_id,
            }
        try:
            return self._client.open(Setup.of(given))
        except ValueError:  # a size that is none
            return codes.INVALID

    @answers_code
    def close(self) -> int:
        self._client.close()
        self._registered.clear()
        return codes.OK

    def health_check(self) -> int:
        """0: a node answers; 1: not set up; 2: no node answers."""
        if not self._client.ready:
            return 1
        return 0 if self._client.answers() else 2

    def get_hostname(self) -> str:
        return self._client.hostname

    @answers_code
    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Only recorded: calls take any address."""
        return self._registered.add(*arguments.numbers([buffer_ptr, size], "buffer_ptr and size"))

    @answers_code
    def unregister_buffer(self, buffer_ptr: int) -> int:
        return self._registered.remove(*arguments.numbers([buffer_ptr], "buffer_ptr"))

    # --- put

    @answers_code
    def put(self, key: str, value: Buffer, config: ReplicateConfig = PLAIN) -> int:
        """0 also for a key that is there: its value stays."""
        return self._put([arguments.text(key)], [Pieces.of(value)], config)[0]

    @answers_code
    def put_parts(self, key: str, *parts: Buffer, config: ReplicateConfig = PLAIN) -> int:
        """One value in several buffers; without any, nothing is stored."""
        if not parts:
            return codes.OK
        return self._put([arguments.text(key)], [Pieces.of(*parts)], config)[0]

    @answers_code
    def put_batch(self, keys: Sequence[str], values: Sequence[Buffer], config: ReplicateConfig = PLAIN) -> int:
        """0, or the code of a value that was not stored."""
        if len(keys) != len(values):
            return codes.INVALID
        ends = self._put(arguments.texts(keys), [Pieces.of(value) for value in values], config)
        return next((end for end in ends if end), codes.OK)

    @answers_code
    def put_from(self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig = PLAIN) -> int:
        return self._put([arguments.text(key)], [arguments.pieces([buffer_ptr], [size])], config)[0]

    @answers_codes
    def batch_put_from(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int], config: ReplicateConfig = PLAIN
    ) -> list[int]:
        found = arguments.rows([[one] for one in buffer_ptrs], [[one] for one in sizes], len(keys))
        return self._put(arguments.texts(keys), found, config)

    @answers_codes
    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        config: ReplicateConfig = PLAIN,
    ) -> list[int]:
        """A value is the concatenation of its pieces."""
        return self._put(arguments.texts(keys), arguments.rows(all_buffer_ptrs, all_sizes, len(keys)), config)

    def _put(self, keys: list[str], values: Sequence[Pieces | None] | None, config: ReplicateConfig) -> list[int]:
        """A code per key; INVALID for a value that is None, and for all if `values` is."""
        if not isinstance(config, ReplicateConfig):
            raise TypeError(f"config must be a ReplicateConfig, not {type(config).__name__}")
        if values is None:
            return [codes.INVALID] * len(keys)
        pin, replicas = bool(config.with_hard_pin), arguments.numbers([config.replica_num], "replica_num")[0]
        good = {i: value for i, value in enumerate(values) if value is not None}
        items = [(keys[i], value) for i, value in good.items()]
        ends = dict(zip(good, self._client.put(items, pin=pin, replicas=replicas), strict=True))
        return [ends.get(i, codes.INVALID) for i in range(len(keys))]

    # --- replace

    @answers_code
    def upsert(self, key: str, value: Buffer, config: ReplicateConfig = PLAIN) -> int:
        """Replace the value; for a moment the key is missing."""
        return self._upsert([arguments.text(key)], [Pieces.of(value)], config)[0]

    @answers_code
    def upsert_parts(self, key: str, *parts: Buffer, config: ReplicateConfig = PLAIN) -> int:
        return self._upsert([arguments.text(key)], [Pieces.of(*parts)], config)[0]

    @answers_code
    def upsert_batch(self, keys: Sequence[str], values: Sequence[Buffer], config: ReplicateConfig = PLAIN) -> int:
        if len(keys) != len(values):
            return codes.INVALID
        ends = self._upsert(arguments.texts(keys), [Pieces.of(value) for value in values], config)
        return next((end for end in ends if end), codes.OK)

    @answers_code
    def upsert_from(self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig = PLAIN) -> int:
        return self._upsert([arguments.text(key)], [arguments.pieces([buffer_ptr], [size])], config)[0]

    @answers_codes
    def batch_upsert_from(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int], config: ReplicateConfig = PLAIN
    ) -> list[int]:
        found = arguments.rows([[one] for one in buffer_ptrs], [[one] for one in sizes], len(keys))
        return self._upsert(arguments.texts(keys), found, config)

    def _upsert(self, keys: list[str], values: Sequence[Pieces | None] | None, config: ReplicateConfig) -> list[int]:
        if values is not None:
            given = [key for key, value in zip(keys, values, strict=True) if value is not None and value.nbytes]
            self._client.run(lambda values: values.remove(given))
        return self._put(keys, values, config)

    # --- get

    @answering(lambda given, code: b"")
    def get(self, key: str) -> bytes:
        """b'' if it is missing."""
        return self._get([arguments.text(key)])[0]

    @answering(lambda given, code: [b""] * len(given[0]))
    def get_batch(self, keys: Sequence[str]) -> list[bytes]:
        return self._get(arguments.texts(keys))

    def _get(self, keys: list[str]) -> list[bytes]:
        found: list[bytes] = [b""] * len(keys)

        def target(i: int, nbytes: int) -> Pieces:
            found[i] = short = blank_bytes(max(2, nbytes))
            return Pieces.of(short) if nbytes > 1 else Pieces([(Pieces.of(short).pieces[0][0], 1)], short)

        ends = self._client.get(keys, target)
        return [value[:end] if end > 0 else b"" for value, end in zip(found, ends, strict=True)]

    @answering(lambda given, code: None)
    def get_buffer(self, key: str) -> BufferHandle | None:
        """None if it is missing."""
        return self._get_buffers([arguments.text(key)])[0]

    @answering(lambda given, code: [None] * len(given[0]))
    def batch_get_buffer(self, keys: Sequence[str]) -> list[BufferHandle | None]:
        return self._get_buffers(arguments.texts(keys))

    def _get_buffers(self, keys: list[str]) -> list[BufferHandle | None]:
        found: list[BufferHandle | None] = [None] * len(keys)

        def target(i: int, nbytes: int) -> Pieces:
            found[i] = made = BufferHandle(nbytes)
            return Pieces([(made.ptr(), nbytes)], made)

        ends = self._client.get(keys, target)
        return [handle if end > 0 else None for handle, end in zip(found, ends, strict=True)]

    @answers_code
    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        """Bytes of the value; the memory may be larger."""
        return self._get_into([arguments.text(key)], [arguments.pieces([buffer_ptr], [size])])[0]

    @answers_codes
    def batch_get_into(self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]) -> list[int]:
        found = arguments.rows([[one] for one in buffer_ptrs], [[one] for one in sizes], len(keys))
        return self._get_into(arguments.texts(keys), found)

    @answers_codes
    def batch_get_into_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        prefer_alloc_in_same_node: bool = False,
    ) -> list[int]:
        """A value is cut into the pieces in order, which must be as long as the value."""
        rooms = arguments.rows(all_buffer_ptrs, all_sizes, len(keys))
        return self._get_into(arguments.texts(keys), rooms, exactly=True)

    def _get_into(self, keys: list[str], into: Sequence[Pieces | None] | None, exactly: bool = False) -> list[int]:
        """`exactly`: memory of another size than the value is an error, too."""
        if into is None:
            return [codes.INVALID] * len(keys)
        rooms = into

        def target(i: int, nbytes: int) -> Pieces | int:
            room = rooms[i]
            if exactly and (room is None or room.nbytes > nbytes):
                return codes.TRANSFER
            return codes.INVALID if room is None or room.nbytes < nbytes else room

        return self._client.get(keys, target)

    # --- sessions

    @answers_codes
    def batch_get_session_start(self, keys: Sequence[str]) -> list[int]:
        names = arguments.texts(keys)
        return self._reads.start(names, self._client.run(lambda values: values.exist(names)))

    @answers_codes
    def batch_get_into_multi_buffer_ranges(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        all_src_offsets: Sequence[Sequence[int]],
    ) -> list[int]:
        """Piece j of a value is its range that begins at offset j. Per key the bytes of its pieces."""
        found = arguments.rows(all_buffer_ptrs, all_sizes, len(keys))
        if found is None or len(all_src_offsets) != len(keys):
            return [codes.INVALID] * len(keys)
        offsets = [arguments.numbers(some, "offsets") for some in all_src_offsets]
        return self._reads.read(arguments.texts(keys), found, offsets)

    @answers_code
    def batch_get_session_end(self, keys: Sequence[str]) -> int:
        return self._reads.end(arguments.texts(keys))

    @answers_codes
    def batch_put_session_start(
        self, keys: Sequence[str], sizes: Sequence[int], config: ReplicateConfig = PLAIN
    ) -> list[int]:
        names, lengths = arguments.texts(keys), arguments.numbers(sizes, "sizes")
        if len(lengths) != len(names):
            return [codes.INVALID] * len(names)
        there = self._client.run(lambda values: values.exist(names))
        return self._writes.start(names, lengths, there, config)

    @answers_codes
    def batch_put_from_multi_buffer_ranges(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        all_dst_offsets: Sequence[Sequence[int]],
    ) -> list[int]:
        found = arguments.rows(all_buffer_ptrs, all_sizes, len(keys))
        if found is None or len(all_dst_offsets) != len(keys):
            return [codes.INVALID] * len(keys)
        offsets = [arguments.numbers(some, "offsets") for some in all_dst_offsets]
        return self._writes.write(arguments.texts(keys), found, offsets)

    @answers_codes
    def batch_put_session_end(self, keys: Sequence[str]) -> list[int]:
        """The values become readable."""
        names = arguments.texts(keys)
        ends = dict.fromkeys(names, codes.INVALID)
        for key, (value, config) in self._writes.take(names).items():
            wish = config if isinstance(config, ReplicateConfig) else PLAIN
            ends[key] = self._put([key], [Pieces.of(value)], wish)[0]
        return [ends[name] for name in names]

    @answers_codes
    def batch_put_session_revoke(self, keys: Sequence[str]) -> list[int]:
        names = arguments.texts(keys)
        taken = self._writes.take(names)
        return [codes.OK if name in taken else codes.INVALID for name in names]

    def _fetch(self, keys: list[str]) -> dict[str, bytearray]:
        return {key: value for key, value in zip(keys, self._get_buffers(keys), strict=True) if value is not None}

    # --- look and remove

    @answers_code
    def is_exist(self, key: str) -> int:
        """1 or 0."""
        name = arguments.text(key)
        return int(self._client.run(lambda values: values.exist([name]))[0])

    @answers_codes
    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        names = arguments.texts(keys)
        return [int(here) for here in self._client.run(lambda values: values.exist(names))]

    @answers_code
    def get_size(self, key: str) -> int:
        """Bytes."""
        name = arguments.text(key)
        return self._client.run(lambda values: values.sizes([name]))[0]

    @answering(lambda given, code: {})
    def batch_get_replica_desc(self, keys: Sequence[str]) -> dict[str, list[Replica]]:
        """Missing keys are left out."""
        names = arguments.texts(keys)
        found = self._client.run(lambda values: values.on_ssd(names))
        return {name: [Replica(ssd)] for name, ssd in zip(names, found, strict=True) if ssd is not None}

    @answering(lambda given, code: [])
    def get_replica_desc(self, key: str) -> list[Replica]:
        return self.batch_get_replica_desc([arguments.text(key)]).get(key, [])

    @answers_code
    def remove(self, key: str, force: bool = False) -> int:
        """Ours has no leases, so `force` changes nothing."""
        name = arguments.text(key)
        return self._client.run(lambda values: values.remove([name]))[0]

    @answers_codes
    def batch_remove(self, keys: Sequence[str], force: bool = False) -> list[int]:
        names = arguments.texts(keys)
        return self._client.run(lambda values: values.remove(names))

    @answers_code
    def remove_by_regex(self, regex_pattern: str, force: bool = False) -> int:
        """The number of removed values, whose names contain a match."""
        try:
            pattern = re.compile(arguments.text(regex_pattern, "regex_pattern"))
        except re.error:
            return codes.INVALID
        return self._client.run(lambda values: values.remove_matching(pattern))

    @answers_code
    def remove_all(self, force: bool = False) -> int:
        """The number of removed values, of this client's tenant only."""
        return self._client.run(lambda values: values.remove_all())
