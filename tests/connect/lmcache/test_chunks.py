"""LMCache's chunks: names and layouts that say all that decides about their bytes."""

from types import SimpleNamespace

from connect.lmcache.chunks import LAYOUT_BYTES, engine_root, layout_of, leading, server_name

METADATA = {"kv_shape": (3, 2, 16, 4, 32), "kv_dtype": "torch.bfloat16", "chunk_size": 16, "use_mla": False}
KEY = {
    "model_name": "org/model", "kv_rank": 0x01000100, "object_group_id": 0, "cache_salt": "", "chunk_hash": b"\x0a" * 32
}  # fmt: skip


def root(tag="", serde="naive", **facts):
    return engine_root(SimpleNamespace(remote_serde=serde), SimpleNamespace(**(METADATA | facts)), tag)


def name(tag="", **facts):
    return server_name(SimpleNamespace(**(KEY | facts)), tag)


def test_an_engines_root_has_what_its_keys_lack():
    others = [
        root(), root("v2"), root(serde="cachegen"), root(kv_shape=(3, 2, 16, 2, 64)), root(kv_dtype="torch.float16"),
        root(chunk_size=32), root(use_mla=True),
    ]  # fmt: skip
    assert len(set(others)) == len(others)
    assert all(one.startswith("lmcache/") for one in others)


def test_a_name_of_the_server_has_the_whole_key():
    others = [
        name(), name("v2"), name(model_name="org"), name(kv_rank=7), name(object_group_id=1), name(cache_salt="user"),
        name(chunk_hash=b"\x0b" * 32),
    ]  # fmt: skip
    assert len(set(others)) == len(others)
    assert name() == "lmcache-mp/org/model/rank01000100/group0/" + "0a" * 32


def test_a_layout_is_its_shapes_and_types():
    others = [
        layout_of([(2, 3, 16, 128)], ["torch.bfloat16"]), layout_of([(2, 3, 16, 128)], ["torch.float16"]),
        layout_of([(1, 3, 16, 256)], ["torch.bfloat16"]), layout_of([(2, 3, 8, 128)] * 2, ["torch.bfloat16"] * 2),
    ]  # fmt: skip
    assert len(set(others)) == len(others) and {len(one) for one in others} == {LAYOUT_BYTES}
    assert others[0] == layout_of([[2, 3, 16, 128]], ["bfloat16"])


def test_the_leading_run():
    assert [leading(row) for row in ([], [False], [True], [True, False, True])] == [0, 0, 1, 1]
