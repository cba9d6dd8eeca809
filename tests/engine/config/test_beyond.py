"""--beyond-memory: the lengths that a node accepts, and the flags that it does not work with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.config.beyond import beyond_room, lends
from engine.config.config import Config
from engine.config.flags import UsageError
from engine.config.resolve import GiB, arena_tokens
from engine.config.shape import geometry
from engine.model.latent_config import Latent
from sched.beyond import Room
from tests.engine.config.test_resolve import LAPTOP, MODEL, NEXT, settle

ON = ("--beyond-memory", "on", "--kv-cache-bytes", "32M")
WIDE = replace(MODEL, max_position_embeddings=1 << 20)
BLOCK_BYTES = 16 * 46_080
SIZES = Latent(rank=512, rope_size=64, nope_size=64, value_size=64)
LATENT = replace(MODEL, num_kv_heads=1, head_size=576, latent=SIZES)


def room(config: Config) -> Room | None:
    return beyond_room(config, geometry(config, MODEL, config.kv_cache_dtype))


def test_the_context_grows_with_the_tiers():
    plain = settle("--kv-cache-bytes", "32M", model=WIDE)
    assert plain.max_model_len == 45 * 16 and room(plain) is None
    dram = settle(*ON, "--dram-bytes", "64M", model=WIDE)
    found = room(dram)
    assert found is not None and (found.window_blocks, found.hot_blocks) == (0, 22), "half of an arena of 45"
    assert found.near_blocks == 91 * 3 // 4 and dram.max_model_len == (22 + 68) * 16
    assert arena_tokens(dram, geometry(dram, WIDE, dram.kv_cache_dtype)) == 45 * 16
    ssd = settle(*ON, "--dram-bytes", "64M", "--ssd-path", "x", "--ssd-bytes", "1G", model=WIDE)
    with_ssd = room(ssd)
    assert with_ssd is not None and with_ssd.window_blocks == 5 and with_ssd.hot_blocks == 17
    assert with_ssd.far_blocks > 700 and ssd.max_model_len == with_ssd.tokens
    assert settle(*ON, "--dram-bytes", "64M", "--max-model-len", "900", model=WIDE).max_model_len == 900


def test_the_share_is_made_for_it_where_it_is_needed():
    assert settle(*ON, "--role", "prefill,decode").dram_bytes == GiB // BLOCK_BYTES * BLOCK_BYTES
    assert settle(*ON, "--role", "prefill").dram_bytes == 0
    assert settle(*ON, "--role", "prefill").max_model_len == 8192, "it accepts them for the decode nodes"
    assert settle(*ON, "--role", "decode").max_model_len == 8192


@pytest.mark.parametrize(
    ("argv", "model", "reason"),
    [
        (("--pool-dtype", "int8"), MODEL, "--pool-dtype int8"),
        ((), replace(MODEL, windows=(512, 0) * 15), "layers see a window"),
        (("--kv-groups", "uniform"), replace(MODEL, windows=(512,) * 30), "layers see a window"),
        ((), NEXT, "--beyond-memory on does not work with a model with states"),
        (("--dram-bytes", "1M"), MODEL, "--dram-bytes 737280 has room for 1 blocks of 737280 bytes; give more"),
        (("--kv-cache-bytes", "2M", "--max-num-batched-tokens", "64"), MODEL, "give --kv-cache-bytes 5898240 or more"),
        (("--dram-bytes", "64M", "--max-model-len", "8000"), MODEL, "or --dram-bytes 470384640 or more"),
        (("--tensor-parallel-size", "3"), MODEL, "--tensor-parallel-size is 3"),
    ],
)
def test_what_it_does_not_work_with(argv, model, reason):
    with pytest.raises(UsageError) as error:
        settle(*ON, *argv, model=model)
    assert reason in str(error.value)


def test_who_lends_and_how_long_a_context_may_be_then():
    def lending(*argv: str) -> bool:
        config = settle(*argv)
        return lends(config, geometry(config, MODEL, config.kv_cache_dtype))

    assert not lending("--dram-bytes", "1G")
    for role in ("store", "prefill", "decode", "mixed"):
        assert lending("--role", role, "--attention-elsewhere", "auto"), "a share is made for it"
    assert not lending("--role", "prefill", "--attention-elsewhere", "auto", "--dram-bytes", "0")
    asked = ("--dram-bytes", "64M", "--max-model-len", "8000")
    assert settle(*ON, *asked, "--attention-elsewhere", "always", model=WIDE).max_model_len == 8000
    auto = settle(*ON, "--dram-bytes", "64M", "--attention-elsewhere", "auto", model=WIDE)
    assert auto.max_model_len == (22 + 68) * 16, "what this node holds itself"


@pytest.mark.parametrize(
    ("argv", "model", "reason"),
    [
        (("--pool-dtype", "int8"), MODEL, "--attention-elsewhere auto does not work with --pool-dtype int8"),
        ((), replace(MODEL, windows=(512, 0) * 15), "--kv-groups windows"),
        (("--role", "store"), LATENT, "a model with a latent"),
    ],
)
def test_what_cannot_be_attended_to_in_parts(argv, model, reason):
    with pytest.raises(UsageError) as error:
        settle("--attention-elsewhere", "auto", *argv, model=model)
    assert reason in str(error.value)


def test_a_latent_and_a_gpu_are_refused():
    with pytest.raises(UsageError, match="a latent"):
        settle(*ON, model=LATENT)
    from tests.engine.config.test_resolve import H100

    with pytest.raises(UsageError, match="--device cuda"):
        settle(*ON, machine=H100)
    assert settle(*ON, "--device", "cpu", machine=LAPTOP).device == "cpu"
