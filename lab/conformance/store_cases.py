"""Calls of mooncake.store with good, bad and missing arguments, in a process that has upstream's module or ours.

    python store_cases.py ADDRESS FIRST     prints one JSON line per case from number FIRST on: [name, answer]

It imports nothing but the standard library and mooncake.store, because it also runs where only upstream's wheel is
installed. A case that ends the process leaves no line; lab/conformance/answers.py then starts again behind it.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from importlib import import_module
from typing import Any

BEFORE_SETUP = [
    "n.get('k')",
    "n.get_batch(['k', 'l'])",
    "n.get_buffer('k')",
    "n.get_size('k')",
    "n.is_exist('k')",
    "n.batch_is_exist(['k', 'l'])",
    "n.remove('k')",
    "n.remove_all()",
    "n.remove_by_regex('k')",
    "n.health_check()",
    "n.register_buffer(A, 100)",
    "n.unregister_buffer(A)",
    "n.get_into('k', A, 10)",
    "n.batch_get_into(['k'], [A], [10])",
    "n.batch_get_into_multi_buffers(['k'], [[A]], [[10]])",
    "n.batch_get_session_start(['k'])",
    "n.batch_get_replica_desc(['k'])",
    "n.put_from('k', A, 10)",
    "n.batch_put_from(['k'], [A], [10])",
    "n.batch_put_from_multi_buffers(['k'], [[A]], [[10]])",
    "n.put_batch(['k'], [b'v'])",
    "n.put_parts('k', b'v')",
    "n.put('k', b'v')",
    "n.get_hostname()",
    "n.close()",
]

AFTER_SETUP = [
    # setup and memory
    "s.setup('127.0.0.1', 'P2PHANDSHAKE', 1 << 26, 1 << 24, 'tcp', '', ADDRESS)",
    "s.setup('h')",
    "s.setup('h', '', 0, 0, 'tcp', '', 5)",
    "s.setup('h', '', 0, 0, 'tcp', '', '', unheard_of=1)",
    "s.health_check()",
    "s.get_hostname().count(':')",
    "s.register_buffer(A, SIZE)",
    "s.register_buffer(A, SIZE)",
    "s.register_buffer(A + 10, 5)",
    "s.register_buffer(B, SIZE)",
    "s.register_buffer('A', 5)",
    "s.register_buffer(A)",
    "s.unregister_buffer(B)",
    "s.unregister_buffer(B)",
    "s.unregister_buffer(A + 1)",
    "s.register_buffer(B, SIZE)",
    # put and get
    "s.put('a', b'first')",
    "s.put('a', b'second')",
    "s.get('a')",
    "s.get('none')",
    "s.put('a')",
    "s.put('bytearray', bytearray(b'first'))",
    "s.get('bytearray')",
    "s.put('memoryview', memoryview(b'first'))",
    "s.put('text', 'text')",
    "s.put(5, b'v')",
    "s.put(b'bytes', b'v')",
    "s.put('none', None)",
    "s.put('', b'v')",
    "s.put('empty', b'')",
    "s.is_exist('empty')",
    "s.put('one', b'1')",
    "s.get('one')",
    "s.put('n' * 5000, b'long name')",
    "s.get('n' * 5000)",
    "s.put('sp ace/\\u00fc\\U0001f319', b'v')",
    "s.get('sp ace/\\u00fc\\U0001f319')",
    "s.put('config', b'v', config())",
    "s.put('replicas', b'v', config(replica_num=2))",
    "s.put('hard', b'v', config(with_hard_pin=True))",
    "s.put('segment', b'v', config(preferred_segment='nowhere:1'))",
    "s.put('groups', b'v', config(group_ids=['g']))",
    "s.put('wrong config', b'v', 5)",
    "s.get(5)",
    "s.get()",
    # existence and size
    "s.is_exist('a')",
    "s.is_exist('none')",
    "s.is_exist('')",
    "s.is_exist(5)",
    "s.batch_is_exist(['a', 'none', 'a'])",
    "s.batch_is_exist([])",
    "s.batch_is_exist('a')",
    "s.batch_is_exist(('a',))",
    "s.batch_is_exist([5])",
    "s.get_size('a')",
    "s.get_size('none')",
    # batches of bytes
    "s.put_batch(['p1', 'p2'], [b'1', b'22'])",
    "s.put_batch(['p1', 'p3'], [b'new', b'333'])",
    "s.get_batch(['p1', 'p2', 'p3', 'none'])",
    "s.get_batch([])",
    "s.put_batch(['p4', 'p5'], [b'1'])",
    "s.put_batch([], [])",
    "s.put_parts('parts', b'ab', b'cd')",
    "s.get('parts')",
    "s.put_parts('no parts')",
    "s.put_parts('parts', b'else')",
    # raw memory
    "s.put_from('from', A, 100)",
    "s.get('from') == PATTERN[:100]",
    "s.put_from('from', A, 50)",
    "s.put_from('from unregistered', U, 100)",
    "s.get('from unregistered') == PATTERN[:100]",
    "s.put_from('from none', 0, 100)",
    "s.put_from('from nothing', A, 0)",
    "s.put_from('from negative', A, -1)",
    "s.get_into('from', B, SIZE)",
    "s.get_into('from', B, 100)",
    "s.get_into('from', B, 99)",
    "s.get_into('none', B, 100)",
    "s.get_into('from', U, 100)",
    "s.get_into('from', 0, 100)",
    "s.batch_put_from(['b1', 'b2', 'b1'], [A, A + 10, A + 20], [10, 10, 10])",
    "s.get('b1') == PATTERN[:10]",
    "s.batch_put_from(['b3', 'b4'], [A], [10])",
    "s.batch_put_from(['b5', 'b6'], [A, A], [10, 0])",
    "s.batch_put_from([], [], [])",
    "s.batch_get_into(['b1', 'none', 'b2'], [B, B, B], [10, 10, 5])",
    "s.batch_get_into(['b1', 'b2'], [B], [10])",
    "s.batch_get_into([], [], [])",
    "s.batch_put_from_multi_buffers(['m1', 'm2'], [[A, A + 50], [A + 100]], [[20, 30], [40]])",
    "s.get('m1') == PATTERN[:20] + PATTERN[50:80]",
    "s.batch_put_from_multi_buffers(['m3'], [[A, A]], [[20]])",
    "s.batch_put_from_multi_buffers(['m4', 'm5'], [[A]], [[20]])",
    "s.batch_put_from_multi_buffers(['m6'], [[]], [[]])",
    "s.batch_put_from_multi_buffers([], [], [])",
    "s.batch_get_into_multi_buffers(['m1', 'none'], [[B, B + 20], [B]], [[20, 30], [10]])",
    "ctypes.string_at(B, 50) == PATTERN[:20] + PATTERN[50:80]",
    "s.batch_get_into_multi_buffers(['m1'], [[B, B + 20]], [[20, 29]])",
    "s.batch_get_into_multi_buffers(['m1'], [[B, B + 20]], [[20, 31]])",
    "s.batch_get_into_multi_buffers(['m1'], [[B]], [[20, 30]])",
    "s.batch_get_into_multi_buffers(['m1', 'm2'], [[B]], [[50]])",
    "s.batch_get_into_multi_buffers(['m1'], [[B]], [[50]], True)",
    # handles
    "s.get_buffer('a').size()",
    "bytes(memoryview(s.get_buffer('a')))",
    "[ctypes.string_at(one.ptr(), 5) for one in [s.get_buffer('a')]]",
    "s.get_buffer('none')",
    "[one and one.size() for one in s.batch_get_buffer(['a', 'none'])]",
    "s.batch_get_buffer([])",
    # sessions
    "s.batch_get_session_start(['m1', 'none'])",
    "s.batch_get_session_start(['m1'])",
    "s.batch_get_session_start([])",
    "s.batch_get_into_multi_buffer_ranges(['m1'], [[B, B + 10]], [[10, 5]], [[0, 40]])",
    "ctypes.string_at(B, 15) == (PATTERN[:20] + PATTERN[50:80])[:10] + (PATTERN[:20] + PATTERN[50:80])[40:45]",
    "s.batch_get_into_multi_buffer_ranges(['m1'], [[B]], [[10]], [[45]])",
    "s.batch_get_into_multi_buffer_ranges(['m1'], [[B]], [[10, 5]], [[0]])",
    "s.batch_get_into_multi_buffer_ranges(['m1', 'm2'], [[B]], [[10]], [[0]])",
    "s.batch_get_into_multi_buffer_ranges(['m2'], [[B]], [[10]], [[0]])",
    "s.batch_get_session_end(['m1'])",
    "s.batch_get_session_end(['m1', 'none'])",
    "s.batch_get_into_multi_buffer_ranges(['m1'], [[B]], [[10]], [[0]])",
    "s.batch_put_session_start(['w1', 'w2'], [100, 50])",
    "s.batch_put_session_start(['w1'], [100])",
    "s.batch_put_session_start(['a'], [100])",
    "s.batch_put_session_start(['w3'], [0])",
    "s.batch_put_session_start(['w4', 'w5'], [10])",
    "s.batch_put_from_multi_buffer_ranges(['w1'], [[A, A + 50]], [[50, 50]], [[0, 50]])",
    "s.batch_put_from_multi_buffer_ranges(['w1'], [[A]], [[50]], [[60]])",
    "s.batch_put_from_multi_buffer_ranges(['w9'], [[A]], [[50]], [[0]])",
    "s.is_exist('w1')",
    "s.batch_put_session_end(['w1'])",
    "s.get('w1') == PATTERN[:100]",
    "s.batch_put_session_end(['w1', 'w9'])",
    "s.batch_put_session_start(['w6'], [50])",
    "s.batch_put_session_end(['w6', 'w9'])",
    "s.batch_put_session_end(['w6'])",
    "s.batch_put_session_revoke(['w2'])",
    "s.batch_put_session_revoke(['w2', 'w9'])",
    "s.is_exist('w2')",
    # replica descriptions
    "sorted(s.batch_get_replica_desc(['a', 'none']))",
    "[one.is_memory_replica() for one in s.batch_get_replica_desc(['a'])['a']]",
    "[one.is_disk_replica() for one in s.batch_get_replica_desc(['a'])['a']]",
    "len(s.get_replica_desc('a'))",
    "len(s.get_replica_desc('none'))",
    # replace
    "s.upsert('a', b'replaced')",
    "s.get('a')",
    "s.upsert('upserted', b'new')",
    "s.upsert('a', b'')",
    "s.upsert_from('from', A + 1, 20)",
    "s.get('from') == PATTERN[1:21]",
    "s.batch_upsert_from(['b1', 'b9'], [A + 5, A], [10, 10])",
    "s.upsert_parts('parts', b'x', b'yz')",
    "s.upsert_batch(['p1', 'p2'], [b'x', b'y'])",
    "s.get_batch(['b1', 'parts', 'p1', 'p2'])",
    # remove
    "s.remove('a')",
    "s.remove('a', True)",
    "s.remove('a', force=True)",
    "s.remove('none')",
    "s.get('a')",
    "s.batch_remove(['p1', 'none'], True)",
    "s.batch_remove([])",
    "s.put_batch(['r/1', 'r/2', 'x/r/3'], [b'1', b'2', b'3'])",
    "s.remove_by_regex('[')",
    "s.remove_by_regex('^none$')",
    "s.remove_by_regex('r/', True)",
    "s.batch_is_exist(['r/1', 'r/2', 'x/r/3'])",
    "s.put('wait', b'v')",
    "time.sleep(6) or s.remove('wait')",
    "s.put('full match', b'v')",
    "s.remove_by_regex('full', True)",
    "s.remove_by_regex('', True) > 5",
    "s.put_batch(['z1', 'z2', 'z3'], [b'1', b'2', b'3'])",
    "s.remove_all(True)",
    "s.remove_all(True)",
    "s.remove_all()",
    "s.close()",
    "s.close()",
    "closed().get('z1')",
    "closed().health_check()",
    "closed().is_exist('z1')",
    "closed().put_from('closed', A, 10)",
    "closed().setup('127.0.0.1', 'P2PHANDSHAKE', 1 << 24, 1 << 24, 'tcp', '', ADDRESS)",
]

SIZE = 1 << 16
PATTERN = bytes(i * 7 % 251 for i in range(SIZE))


def main(address: str, first: int) -> None:
    """Run the cases from number `first` on; those of BEFORE_SETUP get a store of their own."""
    module = import_module("mooncake.store")
    memory = [ctypes.create_string_buffer(PATTERN, SIZE) for _ in range(3)]
    a, b, u = (ctypes.addressof(one) for one in memory)
    known: dict[str, Any] = {"A": a, "B": b, "U": u, "ADDRESS": address}

    def config(**wishes: Any) -> Any:
        made = module.ReplicateConfig()
        for name, value in wishes.items():
            setattr(made, name, value)
        return made

    def closed() -> Any:
        made = opened(module, address)
        made.close()
        return made

    known |= {"closed": closed, "ctypes": ctypes, "time": time, "PATTERN": PATTERN, "SIZE": SIZE, "config": config}
    store = None
    for number, case in enumerate([*BEFORE_SETUP, *AFTER_SETUP]):
        if number < len(BEFORE_SETUP):
            if number < first:
                continue
            known["n"] = module.MooncakeDistributedStore()
        elif store is None:
            store = known["s"] = opened(module, address)
            if number < first:  # the process ended in an earlier one
                store.register_buffer(a, SIZE)
                store.register_buffer(b, SIZE)
        if number >= first:
            print(json.dumps([case, answer(case, known)]), flush=True)


def opened(module: Any, address: str) -> Any:
    """A store in the pool."""
    store = module.MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", 1 << 26, 1 << 24, "tcp", "", address)
    if code:
        sys.exit(f"setup answered {code}")
    return store


def answer(case: str, known: dict[str, Any]) -> str:
    """The answer as text; of an exception its type."""
    try:
        return repr(eval(case, dict(known)))
    except Exception as error:
        return type(error).__name__


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
