"""Converted weights come back as they were, or not at all: damage, truncation, other files, two writers."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import gguf
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from engine.checkpoint import weights
from engine.checkpoint.model_source import describe
from engine.checkpoint.weight_cache import STALE_S, WeightCache
from engine.config.config import Config
from engine.loading import load_model as loading
from engine.model.parallel import Shard

torch.set_num_threads(1)


def tiny_gguf(path: Path, seed: int) -> Path:
    """A Llama of two layers, float16, whose numbers depend on the seed."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(40)
    generator = torch.Generator().manual_seed(seed)
    shapes = {"attn_norm": (32,), "attn_q": (32, 32), "attn_k": (32, 32), "attn_v": (32, 32), "attn_output": (32, 32)}
    shapes |= {"ffn_norm": (32,), "ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64)}
    named = {f"blk.{i}.{name}.weight": shape for i in range(2) for name, shape in shapes.items()}
    named |= {"token_embd.weight": (40, 32), "output_norm.weight": (32,)}
    for name, shape in named.items():
        values = torch.randn(shape, generator=generator)
        writer.add_tensor(name, values.numpy() if len(shape) == 1 else values.half().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def source(tmp_path):
    return describe(str(tiny_gguf(tmp_path / "model.gguf", 1)))


@pytest.fixture
def cache(tmp_path):
    return WeightCache(tmp_path / "cache")


def same(a, b) -> bool:
    return list(a) == list(b) and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


def entries(cache) -> list[Path]:
    return sorted(cache.folder.iterdir())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_second_start_reads_what_the_first_converted(source, cache, dtype, monkeypatch):
    first = weights.load(source, dtype, cache=cache)
    (entry,) = entries(cache)
    monkeypatch.setattr(weights, "_open", None)  # a conversion would fail
    progress = []
    second = weights.load(source, dtype, progress=lambda *at: progress.append(at), cache=cache)
    assert same(first, second)
    assert progress[-1][0] == progress[-1][1] == sum(tensor.nbytes for tensor in first.values())
    assert same(second, {name: load_file(entry)[name] for name in second}), "any safetensors reader can open it"


def test_ranks_cut_their_parts_from_an_entry_and_make_none(source, cache):
    shards = [Shard(source.config, rank, 2) for rank in range(2)]
    plain = [weights.load(source, torch.float32, shard=shard) for shard in shards]
    assert same(weights.load(source, torch.float32, shard=shards[1], cache=cache), plain[1])
    assert not cache.folder.exists()
    weights.load(source, torch.float32, cache=cache)
    for shard, own in zip(shards, plain, strict=True):
        assert same(weights.load(source, torch.float32, shard=shard, cache=cache), own)


def test_each_dtype_has_its_own_entry(source, cache):
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        assert weights.load(source, dtype, cache=cache)["embed"].dtype == dtype
    assert len(entries(cache)) == 2


def test_another_file_under_the_same_name_size_and_date_is_another_entry(source, cache):
    first = weights.load(source, torch.float32, cache=cache)
    before = source.path.stat()
    tiny_gguf(source.path, 2)
    os.utime(source.path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert source.path.stat().st_size == before.st_size
    plain = weights.load(source, torch.float32)
    assert not same(first, plain)
    assert same(weights.load(source, torch.float32, cache=cache), plain)


def test_a_file_that_is_replaced_while_it_is_converted_leaves_no_entry(source, cache, monkeypatch):
    convert = weights._open

    def replaced(its_source):
        tiny_gguf(source.path, 2)
        return convert(its_source)

    monkeypatch.setattr(weights, "_open", replaced)
    weights.load(source, torch.float32, cache=cache)
    assert not cache.folder.exists()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.floats(0, 1, exclude_max=True), change=st.integers(1, 255), head=st.booleans())
def test_a_changed_byte_anywhere_is_never_loaded(source, cache, where, change, head):
    expected = weights.load(source, torch.bfloat16, cache=cache)
    (entry,) = entries(cache)
    data = bytearray(entry.read_bytes())
    size = 8 + int.from_bytes(data[:8], "little") if head else len(data)
    data[int(where * size)] ^= change
    entry.write_bytes(data)
    found = cache.load(entry)
    # What may change without harm is white space and order of the header, never a tensor.
    assert found is None or all(torch.equal(found[name], expected[name]) for name in expected)
    assert same(weights.load(source, torch.bfloat16, cache=cache), expected)
    weights.load(source, torch.bfloat16, cache=cache)


@pytest.mark.parametrize("keep", [0, 5, 8, 200, 0.5, 0.999])
def test_a_truncated_entry_is_converted_again(source, cache, keep, caplog):
    expected = weights.load(source, torch.float32, cache=cache)
    (entry,) = entries(cache)
    data = entry.read_bytes()
    entry.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    assert same(weights.load(source, torch.float32, cache=cache), expected)
    assert "damaged" in caplog.text
    assert entry.read_bytes() == data


def test_an_entry_under_another_name_is_not_believed(source, cache):
    weights.load(source, torch.float32, cache=cache)
    (entry,) = entries(cache)
    moved = entry.with_name("0" * 32 + ".safetensors")
    entry.rename(moved)
    assert cache.load(moved) is None


def _start(path: str, folder: str, barrier, results) -> None:
    torch.set_num_threads(1)
    source, cache = describe(path), WeightCache(Path(folder))
    barrier.wait()
    loaded = [weights.load(source, torch.float32, cache=cache) for _ in range(10)]
    results.put([sum(float(t.double().sum()) for t in found.values()) for found in loaded])


def test_two_processes_at_once(source, cache):
    expected = sum(float(t.double().sum()) for t in weights.load(source, torch.float32).values())
    spawn = multiprocessing.get_context("spawn")
    barrier, results = spawn.Barrier(2), spawn.Queue()
    both = [spawn.Process(target=_start, args=(str(source.path), str(cache.folder), barrier, results)) for _ in "ab"]
    for process in both:
        process.start()
    sums = [results.get(timeout=120) for _ in both]
    for process in both:
        process.join(60)
    assert sums == [[expected] * 10] * 2
    assert [entry.suffix for entry in entries(cache)] == [".safetensors"]


def test_what_was_not_used_longest_goes_and_leftovers_too(source, cache, tmp_path):
    weights.load(source, torch.float32, cache=cache)
    (old,) = entries(cache)
    small = WeightCache(cache.folder, max_bytes=2 * old.stat().st_size)
    others = [describe(str(tiny_gguf(tmp_path / f"other{i}.gguf", i))) for i in (5, 6)]
    weights.load(others[0], torch.float32, cache=small)
    left = cache.folder / "writing-dead"
    left.write_bytes(b"half")
    os.utime(left, (time.time() - 2 * STALE_S,) * 2)
    fresh = cache.folder / "writing-alive"
    fresh.write_bytes(b"half")
    os.utime(small.entry(others[0].path, torch.float32), (1, 1))
    weights.load(source, torch.float32, cache=small)  # used again: not the oldest any more
    weights.load(others[1], torch.float32, cache=small)
    assert set(entries(cache)) == {old, fresh, small.entry(others[1].path, torch.float32)}
    tiny = WeightCache(tmp_path / "tiny", max_bytes=100)
    weights.load(source, torch.float32, cache=tiny)
    assert not tiny.folder.exists()


def test_a_folder_that_cannot_be_written_costs_only_time(source, tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    cache = WeightCache(tmp_path / "file")
    assert same(weights.load(source, torch.float32, cache=cache), weights.load(source, torch.float32))
    assert "could not keep converted weights" in caplog.text


def test_the_flag_chooses_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert loading.weight_cache(Config()).folder == tmp_path / "mooncake" / "weights"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert loading.weight_cache(Config()).folder == Path("~/.cache/mooncake/weights").expanduser()
    assert loading.weight_cache(Config(weight_cache=str(tmp_path / "own"))).folder == tmp_path / "own"
    assert loading.weight_cache(Config(weight_cache="off")) is None
