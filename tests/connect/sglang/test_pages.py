"""SGLang's pages: names that say all that decides about their bytes, memory in pieces, usable prefixes."""

import ctypes
import random
from types import SimpleNamespace

import pytest

from connect.common.raw_memory import address_of
from connect.sglang.pages import Pages, Shard, leading, usable

CONFIG = {
    "model_name": "org/model", "tp_rank": 1, "tp_size": 2, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0,
    "attn_cp_size": 1, "is_mla_model": False, "tp_lcm_size": None, "should_split_heads": False,
}  # fmt: skip


def shard(tag="", **facts):
    return Shard.of(SimpleNamespace(**(CONFIG | facts)), tag)


class HostPool:
    """Two layers of keys and values, `width` bytes per token, as SGLang's layer_first layout has them."""

    def __init__(self, tokens=40, page_size=4, width=3, head_num=2, dtype="torch.int8", layout="layer_first"):
        self.page_size, self.width, self.head_num, self.dtype, self.layout = page_size, width, head_num, dtype, layout
        self.layers = [bytearray(random.Random(i).randbytes(tokens * width)) for i in range(4)]

    def get_page_buffer_meta(self, indices):
        starts = [indices[i] * self.width for i in range(0, len(indices), self.page_size)]
        rows = [address_of(layer)[0] + start for start in starts for layer in self.layers]
        return rows, [self.page_size * self.width] * len(rows)

    def page(self, number):
        start, end = number * self.page_size * self.width, (number + 1) * self.page_size * self.width
        return b"".join(bytes(layer[start:end]) for layer in self.layers)


def test_a_page_is_one_value_of_all_its_pieces():
    pool = HostPool()
    pages = Pages(shard(), "kv", pool)
    values = pages.memory([8, 9, 10, 11, 0, 1, 2, 3], 2)
    assert [value.nbytes for value in values] == [48, 48]
    for value, number in zip(values, (2, 0), strict=True):
        room = ctypes.create_string_buffer(value.nbytes)
        value.copy_to(ctypes.addressof(room), 0, value.nbytes)
        assert room.raw == pool.page(number)


@pytest.mark.parametrize("indices", [None, [], [0, 1, 2], [0, 1, 2, 3, 4]])
def test_a_wrong_number_of_indices_is_refused(indices):
    with pytest.raises(ValueError, match="1 pages are 4 indices"):
        Pages(shard(), "kv", HostPool()).memory(indices, 1)


def test_pieces_that_are_not_the_same_for_each_page_are_refused():
    pool = HostPool()
    pool.get_page_buffer_meta = lambda indices: ([1, 2, 3], [1, 1, 1])
    with pytest.raises(ValueError, match="3 pieces"):
        Pages(shard(), "kv", pool).memory([0] * 8, 2)


def name(pool_name="kv", form="", pool=None, **facts):
    (one,) = Pages(shard(**facts), pool_name, pool or HostPool(), form).names(["hash"])
    return one


def test_what_decides_about_the_bytes_is_in_the_name():
    others = [
        name(), name(model_name="org/other"), name(tag="v2"), name(tp_rank=0), name(tp_size=4), name(pp_size=2),
        name(pp_rank=1, pp_size=2), name(attn_cp_size=2), name("swa"), name(form="flat"), name(is_mla_model=True),
        name(pool=HostPool(page_size=8)), name(pool=HostPool(head_num=4)), name(pool=HostPool(dtype="torch.int4")),
        name(pool=HostPool(layout="page_first")),
    ]  # fmt: skip
    assert len(set(others)) == len(others)
    assert name().startswith("sglang/org/model/") and name().endswith("/hash")


def test_ranks_share_latents_but_not_states():
    latents = {name(is_mla_model=True, tp_rank=rank) for rank in range(2)}
    states = {name("mamba", is_mla_model=True, tp_rank=rank) for rank in range(2)}
    assert (len(latents), len(states)) == (1, 2)


def test_halves_of_a_ranks_heads_have_the_names_of_two_ranks():
    two = {name(pool=HostPool(head_num=1), tp_rank=rank, tp_size=2) for rank in range(2)}
    one = Pages(shard(tp_rank=0, tp_size=1, tp_lcm_size=2, should_split_heads=True), "kv", HostPool(head_num=2))
    assert one.values == 2 and set(one.names(["hash"])) == two
    assert one.whole([True, True, True, False]) == [True, False]


def test_a_model_without_a_name_is_refused():
    with pytest.raises(ValueError, match="no model name"):
        shard(model_name=None)


def test_the_leading_run():
    assert [leading(row) for row in ([], [False], [True], [True, False, True])] == [0, 0, 1, 1]


def test_a_pool_that_needs_all_pages_ends_the_prefix_and_a_trailing_one_makes_holes():
    assert usable(4, {}, {}) == ({}, [1, 2, 3, 4])
    assert usable(4, {"index": [True, True, False, True]}, {}) == ({"index": 2}, [1, 2])
    assert usable(4, {"state": [False, True, False, True]}, {"state": 1}) == ({"state": 4}, [2, 4])
    assert usable(4, {"swa": [True, False, True, True]}, {"swa": 2}) == ({"swa": 4}, [1, 4])
    both = {"index": [True, True, True, False], "state": [False, True, False, True]}
    assert usable(4, both, {"state": 0}) == ({"index": 3, "state": 4}, [2])
    assert usable(0, {}, {"state": 1}) == ({}, [])


@pytest.mark.parametrize("seed", range(20))
def test_usable_lengths_by_definition(seed):
    print(f"seed {seed}")
    chance = random.Random(seed)
    pages = chance.randrange(1, 9)
    present = {pool: [chance.random() < 0.7 for _ in range(pages)] for pool in "ab"}
    trailing = {"b": chance.randrange(1, 4)}
    hits, lengths = usable(pages, present, trailing)
    for length in range(1, pages + 1):
        good = all(present["a"][:length]) and all(present["b"][max(0, length - trailing["b"]) : length])
        assert (length in lengths) == good
    assert hits.get("a", 0) == leading(present["a"])
