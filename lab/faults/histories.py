"""Is a history of puts and gets of one key linearizable? A small Porcupine for values that do not change. Pure.

An operation has a call and a return, and takes effect at one moment between them. The history is linearizable if these
moments can be chosen so that the operations, in their order, are valid for one copy of the value (Herlihy and Wing,
1990). A search chooses them (Wing and Gong, 1993): it takes one of the operations that no other one must precede as the
next, and visits each set of done operations with a state only once (Lowe, 2017). Keys are independent of each other, so
each has its own history.

    put v      state None -> v, answer True;   state w -> w, answer False, for any v
    get        answers the state
    an operation without an answer may have taken effect at any time after its call, or never
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

Kind = Literal["put", "get"]
Value = bytes | None


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation on one key. `answer` of a put: whether it was the first; of a get: the value; `failed`: there was
    no answer."""

    kind: Kind
    called: float
    returned: float
    value: Value = None  # the value of a put
    answer: bool | Value = None
    failed: bool = False


def apply(state: Value, operation: Operation) -> tuple[bool, Value]:
    """Whether the operation may take effect in `state`, and the state afterwards."""
    if operation.kind == "get":
        return operation.failed or operation.answer == state, state
    after = operation.value if state is None else state
    return operation.failed or operation.answer == (state is None), after


def linearizable(history: Sequence[Operation], state: Value = None) -> bool:
    """Whether one copy of the value, with `state` at first, could have given these answers."""
    operations = sorted((one for one in history if not (one.failed and one.kind == "get")), key=lambda one: one.called)
    ends = [inf if one.failed else one.returned for one in operations]
    must = sum(1 << i for i, one in enumerate(operations) if not one.failed)
    seen = set()
    todo = [(0, state)]  # done, as bits; the value
    while todo:
        done, value = todo.pop()
        if done & must == must:
            return True
        left = [i for i in range(len(operations)) if not done >> i & 1]
        first_end = min(ends[i] for i in left)
        for i in left:
            if operations[i].called > first_end:
                break  # it, and all later ones, began after an operation that is not done had returned
            fits, after = apply(value, operations[i])
            node = (done | 1 << i, after)
            if fits and node not in seen:
                seen.add(node)
                todo.append(node)
    return False
