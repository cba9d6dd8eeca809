"""Calls of mooncake.store for torch's tensors, in a process that has upstream's module or ours, and torch.

    python tensor_cases.py ADDRESS FIRST     prints one JSON line per case from number FIRST on: [name, answer]

It imports nothing but the standard library, torch and mooncake.store, like store_cases.py.
"""

from __future__ import annotations

import ctypes
import json
import sys
from importlib import import_module
from typing import Any

BEFORE_SETUP = [
    "n.put_tensor('t', T)",
    "n.batch_put_tensor(['t', 'u'], [T, T])",
    "n.get_tensor('t')",
    "n.batch_get_tensor(['t', 'u'])",
    "n.put_tensor_with_tp('t', T, 0, 2, 0)",
    "n.get_tensor_with_tp('t', 0, 2, 0)",
    "n.get_tensor_into('t', A, SIZE)",
    "n.put_tensor_from('t', A, 400)",
]

AFTER_SETUP = [
    "s.register_buffer(A, SIZE)",
    # one tensor
    "s.put_tensor('t', T)",
    "s.get('t')",
    "shown(s.get_tensor('t'))",
    "s.get_tensor('t').is_contiguous()",
    "s.put_tensor('t', T + 1)",
    "shown(s.get_tensor('t')) == shown(T)",
    "[s.put_tensor('d/' + name, made(name)) for name in DTYPES]",
    "[shown(s.get_tensor('d/' + name)) for name in DTYPES]",
    "[s.get('d/' + name)[:32] for name in DTYPES]",
    "s.put_tensor('turned', T.t())",
    "s.get('turned') == s.get('t')[:40] + s.get('turned')[40:]",
    "shown(s.get_tensor('turned')) == shown(T.t())",
    "s.put_tensor('steps', T[:, ::2])",
    "shown(s.get_tensor('steps'))",
    "s.put_tensor('empty', torch.zeros(0, 3))",
    "s.get('empty')",
    "shown(s.get_tensor('empty'))",
    "s.put_tensor('number', torch.tensor(5))",
    "s.get('number')",
    "shown(s.get_tensor('number'))",
    "s.put_tensor('8', torch.zeros([1] * 8))",
    "shown(s.get_tensor('8'))",
    "s.put_tensor('9', torch.zeros([1] * 9))",
    "s.put_tensor('grad', torch.ones(2, requires_grad=True))",
    "s.get_tensor('grad').requires_grad",
    "s.put_tensor('parameter', torch.nn.Parameter(torch.ones(2)))",
    "s.put_tensor('complex', torch.zeros(2, dtype=torch.complex64))",
    "s.put_tensor('sparse', torch.eye(2).to_sparse())",
    "s.put_tensor('meta', torch.empty(2, device='meta'))",
    "s.put_tensor('none', None)",
    "s.put_tensor('list', [1])",
    "s.put_tensor('bytes', b'abc')",
    "s.put_tensor('', T)",
    "s.put_tensor(5, T)",
    "s.put_tensor('t')",
    "s.get_tensor('none')",
    "s.get_tensor('')",
    "s.get_tensor(5)",
    "s.get_tensor()",
    # bytes that are no tensor
    "s.put('short', b'not a tensor')",
    "s.get_tensor('short')",
    "s.put('other', b'not a tensor' * 100)",
    "s.get_tensor('other')",
    "s.put('cut', s.get('t')[:-1])",
    "s.get_tensor('cut')",
    "s.put('long', s.get('t') + b'x')",
    "s.get_tensor('long')",
    "s.put('copy', s.get('t'))",
    "shown(s.get_tensor('copy'))",
    # batches
    "s.batch_put_tensor(['b1', 'b2'], [T, T + 1])",
    "[shown(one) for one in s.batch_get_tensor(['b1', 'none', 'b2', 'other'])]",
    "s.batch_put_tensor(['b3', 'b4'], [T])",
    "s.batch_put_tensor(['b5', 'b6'], [T, None])",
    "s.batch_is_exist(['b3', 'b5', 'b6'])",
    "s.batch_put_tensor([], [])",
    "s.batch_get_tensor([])",
    "s.batch_put_tensor('b7', [T])",
    "s.batch_put_tensor(['b7'], T)",
    "s.batch_get_tensor('t')",
    # parts
    "s.put_tensor_with_tp('p', T, 0, 2, 0)",
    "s.batch_is_exist(['p', 'p_tp_0', 'p_tp_1', 'p_tp_2'])",
    "s.get('p_tp_1')",
    "shown(s.get_tensor_with_tp('p', 0, 2, 0))",
    "shown(s.get_tensor_with_tp('p', 1, 2))",
    "shown(s.get_tensor('p_tp_1'))",
    "s.get_tensor_with_tp('p', 2, 2)",
    "s.get_tensor_with_tp('p', -1, 2)",
    "s.get_tensor_with_tp('p')",
    "s.get_tensor_with_tp('t', 0, 2)",
    "shown(s.get_tensor_with_tp('t'))",
    "shown(s.get_tensor_with_tp('t', 5, 1))",
    "shown(s.get_tensor_with_tp('t', 0, -2))",
    "s.put_tensor_with_tp('q', T, 1, 3, 1)",
    "s.get('q_tp_2')",
    "shown(s.get_tensor_with_tp('q', 2, 3, 1))",
    "shown(s.get_tensor_with_tp('q', 2, 3, 0))",
    "s.put_tensor_with_tp('q', T + 1, 0, 3, 1)",
    "s.put_tensor_with_tp('r', T, 0, 1)",
    "s.batch_is_exist(['r', 'r_tp_0'])",
    "s.put_tensor_with_tp('r', T, 0, -2)",
    "s.put_tensor_with_tp('u', T, 0, 3, 0)",
    "s.put_tensor_with_tp('u', T, 0, 2, 5)",
    "s.put_tensor_with_tp('u', T, 0, 2, -1)",
    "s.put_tensor_with_tp('u', torch.tensor(1.0), 0, 2)",
    "s.put_tensor_with_tp('u', None, 0, 2)",
    "s.put_tensor_with_tp('u', [1, 2], 0, 2)",
    "s.put_tensor_with_tp('u', torch.zeros(4, dtype=torch.complex64), 0, 2)",
    "s.batch_is_exist(['u', 'u_tp_0', 'u_tp_1'])",
    "s.put_tensor_with_tp('rank', T, 7, 2)",
    "s.is_exist('rank_tp_1')",
    "s.put_tensor_with_tp('nothing', torch.zeros(0, 4), 0, 2, 0)",
    "shown(s.get_tensor_with_tp('nothing', 1, 2))",
    "s.put_tensor_with_tp('parameter', torch.nn.Parameter(torch.ones(4)), 0, 2)",
    "s.put_tensor_with_tp('u', T, 0, '2')",
    "s.batch_put_tensor_with_tp(['v', 'w'], [T, T + 1], 0, 2, 1)",
    "[shown(one) for one in s.batch_get_tensor_with_tp(['v', 'w', 'none'], 1, 2)]",
    "s.batch_put_tensor_with_tp(['x', 'y'], [T, None], 0, 2, 0)",
    "s.batch_put_tensor_with_tp(['x', 'y'], [T], 0, 2, 0)",
    "s.batch_put_tensor_with_tp(['z'], [T])",
    "s.batch_is_exist(['x_tp_0', 'y_tp_0', 'z', 'z_tp_0'])",
    "s.batch_put_tensor_with_tp([], [], 0, 2, 0)",
    "s.batch_get_tensor_with_tp([], 0, 2)",
    # with wishes
    "s.pub_tensor('pub', T, config())",
    "s.pub_tensor('pub', T)",
    "s.pub_tensor('pub none', None)",
    "s.pub_tensor('pub', T, 5)",
    "s.batch_pub_tensor(['pub 1', 'pub 2'], [T, T])",
    "s.batch_pub_tensor(['pub 1', 'pub 2'], [T])",
    "s.pub_tensor_with_tp('pub 3', T, config(), 0, 2, 0)",
    "s.batch_pub_tensor_with_tp(['pub 4'], [T], config(), 0, 2, 0)",
    "s.batch_pub_tensor_with_tp(['pub 4'], [], config(), 0, 2, 0)",
    "s.batch_is_exist(['pub', 'pub 1', 'pub 2', 'pub 3_tp_0', 'pub 4_tp_1'])",
    # replace
    "s.upsert_tensor('t', T + 5)",
    "shown(s.get_tensor('t'))",
    "s.upsert_tensor('t', None)",
    "s.upsert_tensor('new', T)",
    "s.batch_upsert_tensor(['t', 'new 2'], [T, T + 7])",
    "[shown(one) for one in s.batch_get_tensor(['t', 'new', 'new 2'])]",
    "s.batch_upsert_tensor(['t'], [])",
    "s.upsert_pub_tensor('t', T + 8, config())",
    "s.batch_upsert_pub_tensor(['t', 'new'], [T + 9, T])",
    "s.batch_upsert_pub_tensor(['t'], [])",
    "shown(s.get_tensor('t'))",
    # memory of the caller
    "shown(s.get_tensor_into('t', A, SIZE))",
    "s.get_tensor_into('t', A, SIZE).data_ptr() - A",
    "shown(s.get_tensor_into('t', A, 400))",
    "s.get_tensor_into('t', A, 399)",
    "s.get_tensor_into('none', A, SIZE)",
    "s.get_tensor_into('other', A, SIZE)",
    "s.get_tensor_into('t', 0, SIZE)",
    "shown(s.get_tensor_into('t', U, SIZE))",
    "[shown(one) for one in s.batch_get_tensor_into(['t', 'none'], [A, A + 1024], [1024, 1024])]",
    "s.batch_get_tensor_into(['t', 'none'], [A], [1024])",
    "s.batch_get_tensor_into([], [], [])",
    "shown(s.get_tensor_with_tp_into('p', A, 1024, 1, 2))",
    "[shown(one) for one in s.batch_get_tensor_with_tp_into(['p', 'none'], [A, A + 1024], [1024, 1024], 1, 2)]",
    "s.batch_get_tensor_with_tp_into(['p', 'none'], [A], [1024], 1, 2)",
    "s.get_into('t', A, SIZE)",
    "s.put_tensor_from('from', A, 400)",
    "shown(s.get_tensor('from'))",
    "s.put_tensor_from('from short', A, 399)",
    "s.put_tensor_from('from long', A, 401)",
    "s.put_tensor_from('from head', A, 304)",
    "s.put_tensor_from('from nothing', A, 0)",
    "s.put_tensor_from('from none', 0, 400)",
    "s.put_tensor_from('from else', A + 8, 400)",
    "s.batch_put_tensor_from(['from 1', 'from 2'], [A, A], [400, 400])",
    "s.batch_put_tensor_from(['from 3', 'from 4'], [A, A], [400])",
    "s.put_tensor_with_tp_from('from 5', A, 400, 0, 2, 1)",
    "shown(s.get_tensor('from 5_tp_1'))",
    "s.put_tensor_with_tp_from('from 6', A, 400)",
    "s.is_exist('from 6')",
    "s.put_tensor_with_tp_from('from 7', A, 400, 0, 5, 0)",
    "s.put_tensor_with_tp_from('from 7', A, 399, 0, 2, 0)",
    "s.batch_put_tensor_with_tp_from(['from 8', 'from 9'], [A, A], [400, 5], 0, 2, 0)",
    "s.batch_put_tensor_with_tp_from(['from 8', 'from 9'], [A, A], [400], 0, 2, 0)",
    "s.upsert_tensor_from('t', A, 400)",
    "s.batch_upsert_tensor_from(['t'], [A], [400])",
    "s.batch_upsert_tensor_from(['t', 'new'], [A], [400])",
    "shown(s.get_tensor('t'))",
    # a tensor larger than a slot of our pool
    "s.put_tensor('large', torch.arange(1 << 18))",
    "bool((s.get_tensor('large') == torch.arange(1 << 18)).all())",
    "s.remove_all(True) > 20",
    "s.close()",
    "closed().get_tensor('t')",
    "closed().put_tensor('t', T)",
]

SIZE = 1 << 16
DTYPES = [
    *("float32", "float64", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "bool"),
    *("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"),
]


def shown(tensor: Any) -> Any:
    """The dtype, the shape and the elements."""
    if tensor is None:
        return None
    plain = tensor.float() if "float8" in str(tensor.dtype) else tensor
    return str(tensor.dtype), list(tensor.shape), plain.flatten().tolist()


def main(address: str, first: int) -> None:
    """Run the cases from number `first` on; those of BEFORE_SETUP get a store of their own."""
    torch, module = import_module("torch"), import_module("mooncake.store")
    memory = [ctypes.create_string_buffer(SIZE) for _ in range(2)]
    known: dict[str, Any] = {"A": ctypes.addressof(memory[0]), "U": ctypes.addressof(memory[1]), "SIZE": SIZE}
    whole = torch.arange(24, dtype=torch.float32).reshape(4, 6)

    def made(dtype: str) -> Any:
        return torch.arange(3).to(getattr(torch, dtype))

    def config(**wishes: Any) -> Any:
        wish = module.ReplicateConfig()
        for name, value in wishes.items():
            setattr(wish, name, value)
        return wish

    def opened() -> Any:
        store = module.MooncakeDistributedStore()
        code = store.setup("127.0.0.1", "P2PHANDSHAKE", 1 << 26, 1 << 24, "tcp", "", address)
        if code:
            sys.exit(f"setup answered {code}")
        return store

    def closed() -> Any:
        store = opened()
        store.close()
        return store

    known |= {"torch": torch, "T": whole, "shown": shown, "made": made, "config": config, "closed": closed}
    known["DTYPES"] = DTYPES
    for number, case in enumerate([*BEFORE_SETUP, *AFTER_SETUP]):
        if number < first:
            continue
        if number < len(BEFORE_SETUP):
            known["n"] = module.MooncakeDistributedStore()
        elif "s" not in known:
            known["s"] = opened()
        print(json.dumps([case, answer(case, known)]), flush=True)


def answer(case: str, known: dict[str, Any]) -> str:
    """The answer as text; of an exception its type."""
    try:
        return repr(eval(case, dict(known)))
    except Exception as error:
        return type(error).__name__


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
