"""Layers on disk: the logits are those of the model in memory, bit for bit, whatever its weights are stored as."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attention.choice.choose import choose
from attention.cpu.level import levels_here
from cache.block import BlockGeometry
from cache.ssd.direct import PAGE
from engine.checkpoint import weights
from engine.checkpoint.layered_weights import open_layered
from engine.checkpoint.model_source import ModelSource, describe
from engine.checkpoint.quantized_weights import load_quantized, reading_of
from engine.config.config import Config
from engine.config.flags import UsageError, parse
from engine.loading.offload_model import load_offloaded, sizes_of
from engine.model.decoder import Model, Outside
from engine.model.ops.cpu import CpuOps
from engine.model.ops.quantized import products_of_kinds
from engine.offload.streamed import StreamedLayers
from engine.step.runner import Row, Runner
from tests.engine.model.test_model import blocks_for, tokens
from tests.engine.tiny_families import empty_pool, save
from tests.engine.tiny_llama import BLOCK_SIZE, logits_of

pytestmark = pytest.mark.skipif(not levels_here(), reason="the kernels need x86 with AVX2, or aarch64")

ROOT = Path(__file__).resolve().parents[3]
STEPS = ((0, 40), (40, 68), (68, 69), (69, 70))


def silent(done: int, total: int) -> None:
    pass


def resident(source: ModelSource, weight_dtype: str, dtype: torch.dtype) -> Model:
    loaded = weights.load(source, dtype) if weight_dtype == "wide" else load_quantized(source, weight_dtype, dtype)
    ops = CpuOps(dtype=dtype, products=products_of_kinds(reading_of(source, weight_dtype, dtype).kinds.values()))
    return Model(source.config, loaded, choose("torch", "cpu"), ops=ops)


def streamed(source: ModelSource, weight_dtype: str, dtype: torch.dtype, folder: Path, memory: int = 0) -> Model:
    """memory: 0 = the least that is possible."""
    reading = reading_of(source, weight_dtype, dtype)
    sizes = sizes_of(source.config, reading.kinds, dtype.itemsize)
    ops = CpuOps(dtype=dtype, products=products_of_kinds(reading.kinds.values()))
    # Packed layers are a little larger than stored ones: whole blocks, whole pages.
    least = sizes.least + max(sizes.layers) // 2 + 8 * PAGE
    offload = StreamedLayers(ops, folder, sizes.fixed, memory or least, 8)
    with open_layered(source, reading, dtype, silent) as found:
        return Model(source.config, found, choose("torch", "cpu"), ops=ops, outside=Outside(offload=offload))


def logits(model: Model, source: ModelSource, dtype: torch.dtype) -> Tensor:
    runner, ids = Runner(model, empty_pool(source, dtype), BLOCK_SIZE), tokens(70)
    return torch.cat([logits_of(runner, [Row(ids[start:end], start, blocks_for(70))]) for start, end in STEPS])


@pytest.mark.parametrize("family", ["llama-bias", "qwen2", "qwen3", "gemma2-caps"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_families(family, dtype, tmp_path):
    torch.set_num_threads(1)
    save(family, tmp_path)
    source = describe(str(tmp_path))
    model = streamed(source, "wide", dtype, tmp_path / "spool")
    assert model.offload is not None and model.offload.plan.streamed
    assert torch.equal(logits(model, source, dtype), logits(resident(source, "wide", dtype), source, dtype))
    model.close()


@pytest.mark.parametrize("weight_dtype", ["int8", "int4", "fp8", "mxfp4"])
def test_forms_of_weights(weight_dtype, tmp_path):
    torch.set_num_threads(1)
    save("llama-bias", tmp_path)
    source = describe(str(tmp_path))
    model = streamed(source, weight_dtype, torch.float32, tmp_path / "spool")
    assert model.offload is not None and model.offload.plan.streamed
    right = logits(resident(source, weight_dtype, torch.float32), source, torch.float32)
    assert torch.equal(logits(model, source, torch.float32), right)
    model.close()


@pytest.mark.parametrize("kind, others", [("Q4_1", {}), ("Q4_K", {"blk.0.attn_v.weight": "Q6_K"})])
def test_matrices_of_a_gguf_file_as_they_are(kind, others, tiny_gguf, tmp_path, monkeypatch):
    """Also q, k and v of several types, which are one product."""
    torch.set_num_threads(1)
    monkeypatch.setitem(tiny_gguf.tensors.__globals__["TINY"], "layers", 4)  # with two, both are in the ring
    source = describe(str(tiny_gguf(tiny_gguf.in_blocks(kind, others))))
    model = streamed(source, "stored", torch.float32, tmp_path / "spool")
    assert model.offload is not None and model.offload.plan.streamed
    right = resident(source, "stored", torch.float32)
    runners = [Runner(each, empty_pool(source, torch.float32), BLOCK_SIZE) for each in (model, right)]
    found, expected = (logits_of(runner, [Row(tokens(40, 200), 0, blocks_for(40))]) for runner in runners)
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())
    model.close()


def test_the_embedded_model_with_less_and_less_memory(embedded, tmp_path):
    """As it is stored in its file: the same greedy logits with everything in memory, half of it, and two layers."""
    torch.set_num_threads(2)
    reading = reading_of(embedded, "stored", torch.float32)
    with reading.opened:
        sizes = sizes_of(embedded.config, reading.kinds, 4)
    right, counts = logits(resident(embedded, "stored", torch.float32), embedded, torch.float32), []
    for memory in (sizes.fixed + sum(sizes.layers) // 2, sizes.least + (1 << 20)):
        model = streamed(embedded, "stored", torch.float32, tmp_path, memory)
        assert model.offload is not None and model.offload.plan.memory_bytes <= memory
        assert torch.equal(logits(model, embedded, torch.float32), right)
        state = model.offload.state()
        assert state["passes"] == len(STEPS) and state["bytes_read"] >= (len(STEPS) - 1) * state["pass_bytes"]
        counts.append(state["streamed_layers"])
        model.close()
    assert 0 < counts[0] < counts[1] == len(sizes.layers)


def test_a_step_that_fails_leaves_the_next_ones_right(tmp_path):
    torch.set_num_threads(1)
    save("llama-bias", tmp_path)
    source = describe(str(tmp_path))
    model = streamed(source, "wide", torch.float32, tmp_path / "spool")
    runner, ids = Runner(model, empty_pool(source, torch.float32), BLOCK_SIZE), tokens(30)
    right = logits_of(runner, [Row(ids, 0, blocks_for(30))])

    def fail(layer: int) -> None:
        raise InterruptedError(layer)

    for _ in range(3):
        with pytest.raises(InterruptedError):
            runner.step([Row(ids, 0, blocks_for(30))], before_layer=lambda layer: fail(layer) if layer == 1 else None)
        assert torch.equal(logits_of(runner, [Row(ids, 0, blocks_for(30))]), right)
    model.close()


def test_a_disk_that_fails_ends_the_step_and_nothing_else(tmp_path, monkeypatch):
    torch.set_num_threads(1)
    save("llama-bias", tmp_path)
    source = describe(str(tmp_path))
    model = streamed(source, "wide", torch.float32, tmp_path / "spool")
    runner, row = Runner(model, empty_pool(source, torch.float32), BLOCK_SIZE), Row(tokens(30), 0, blocks_for(30))
    right = logits_of(runner, [row])
    offload = model.offload
    assert isinstance(offload, StreamedLayers)
    whole = offload._spool.read

    def broken(extent, into):
        raise OSError("no medium")

    monkeypatch.setattr(offload._spool, "read", broken)
    with pytest.raises(OSError, match="no medium"):
        for _ in range(3):
            runner.step([row])
    monkeypatch.setattr(offload._spool, "read", whole)
    for _ in range(3):  # what was read while it was broken comes first
        try:
            found = logits_of(runner, [row])
            break
        except OSError:
            continue
    assert torch.equal(found, right)
    model.close()


def settings(*flags: str) -> Config:
    return parse(["--offload", "auto", "--dtype", "float32", *flags], ())


def load(source: ModelSource, config: Config, folder: Path) -> Model | None:
    sizes = source.config
    shape = BlockGeometry(sizes.num_layers, sizes.num_kv_heads, sizes.head_size, BLOCK_SIZE, "float32")
    return load_offloaded(config, shape, source, choose("torch", "cpu"), "wide", folder, silent)


def test_weights_that_fit_are_loaded_as_always(tmp_path):
    save("llama-bias", tmp_path)
    assert load(describe(str(tmp_path)), settings("--weight-memory-bytes", "1G"), tmp_path / "spool") is None
    assert not (tmp_path / "spool").exists()


def test_what_cannot_be_streamed_is_refused_with_its_reason(tmp_path):
    save("llama-bias", tmp_path / "dense")
    save("qwen3moe-mixed", tmp_path / "experts")
    dense, experts = (describe(str(tmp_path / name)) for name in ("dense", "experts"))
    with pytest.raises(UsageError, match="--weight-memory-bytes 1024: embedding, head and norms take"):
        load(dense, settings("--weight-memory-bytes", "1024"), tmp_path / "spool")
    with pytest.raises(UsageError, match="this model has experts"):
        load(experts, settings("--weight-memory-bytes", "1024"), tmp_path / "spool")
    assert not (tmp_path / "spool").exists()
    (tmp_path / "file").touch()
    small = str(sizes_of(dense.config, {}, 4).least + 4096)
    with pytest.raises(UsageError, match="give a folder on a disk"):
        load(dense, settings("--weight-memory-bytes", small), tmp_path / "file" / "folder")


MEASURE = """
import sys
from pathlib import Path
import torch
sys.path.insert(0, {root!r})
from engine.checkpoint.model_source import describe
from tests.engine.offload.test_streamed import logits, resident, streamed

def memory():
    return {{line.split()[0]: int(line.split()[1]) << 10 for line in open("/proc/self/status") if line[:3] == "Rss"}}

torch.set_num_threads(1)
source = describe("smollm2-135m-instruct")
model = ({make})
logits(model, source, torch.float32)
print(memory()["RssAnon:"] + memory()["RssShmem:"], model.offload and model.offload.plan.pass_bytes)
sys.stdout.flush()
import os
os._exit(0)
"""


def test_streamed_weights_are_not_in_memory(embedded, tmp_path):
    """By the memory that the kernel counts for a process with the embedded model as its file has it, one process each.
    In float32 there would be more to see, but a loaded machine takes minutes to widen it."""
    reading = reading_of(embedded, "stored", torch.float32)
    with reading.opened:
        sizes, found = sizes_of(embedded.config, reading.kinds, 4), []
    small = sizes.least + (1 << 20)
    for make in (
        "resident(source, 'stored', torch.float32)",
        f"streamed(source, 'stored', torch.float32, Path({str(tmp_path)!r}), {small})",
    ):
        script = MEASURE.format(root=str(ROOT), make=make)
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
        used, pass_bytes = done.stdout.split()
        found.append(int(used))
    assert int(pass_bytes) > 0.8 * sum(sizes.layers)
    assert found[0] - found[1] > 0.7 * int(pass_bytes), found


def test_a_model_that_is_closed_leaves_no_thread(tmp_path):
    import threading

    before = threading.active_count()
    save("llama-bias", tmp_path)
    source = describe(str(tmp_path))
    model = streamed(source, "wide", torch.float32, tmp_path / "spool")
    logits(model, source, torch.float32)
    model.close()
    del model
    gc.collect()
    assert threading.active_count() == before
