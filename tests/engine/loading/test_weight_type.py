"""--weight-dtype auto: by the file, the attention backend, the kernels, the cluster and a measurement."""

from __future__ import annotations

import math
from dataclasses import replace

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from attention.cpu.level import levels_here
from engine.checkpoint.model_source import ModelSource, describe
from engine.loading import weight_type as module
from engine.loading.weight_type import ELEMENTS, OUTPUTS, measured_shapes, times_of, weight_type, weights_of_kinds
from engine.model.ops.choice import ROWS
from engine.model.ops.cpu import CpuOps
from engine.model.ops.interface import TorchOps
from engine.model.ops.quantized import BLOCKS, KINDS, Quantized, constant, products_of_kinds
from net.compiled import NotCompiled

CPU = pytest.mark.skipif(not levels_here(), reason="CpuOps needs x86 with AVX2, or aarch64")


@pytest.fixture
def quantized_file(tiny_gguf) -> ModelSource:
    held = {
        name: (gguf.quantize(v, Type.Q4_0), Type.Q4_0) if v.ndim == 2 else v for name, v in tiny_gguf.tensors().items()
    }
    return describe(str(tiny_gguf(held)))


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> list[list[float]]:
    """Seconds that are measured as stored, by our kernels, by torch, for each of ROWS."""
    found = [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0], [3.0, 3.0, 3.0]]
    monkeypatch.setattr(module, "times_of", lambda *_: found)
    return found


@CPU
def test_the_measurement_decides_and_the_log_says_by_what(quantized_file, times, caplog):
    caplog.set_level("INFO")
    assert weight_type(quantized_file, "cpu", torch.bfloat16, "auto") == "stored"
    (message,) = [each for each in caplog.messages if "--weight-dtype auto: " in each]
    assert message.startswith("--weight-dtype auto: stored, because products are no slower: ")
    level = levels_here()[0]
    same = "1000.00 ms for 1 rows, 1000.00 ms for 8 rows, 1000.00 ms for 128 rows"
    assert f": those of all layers take {same} by our kernels of level {level}; in bfloat16 2000.00 ms for 1" in message
    assert f"2000.00 ms for 128 rows by our kernels of level {level}; 3000.00 ms for 1 rows" in message
    assert "3000.00 ms for 128 rows by torch; measured with q4_0 [256, 512], " in message
    times[0] = [1.0, 3.0, 3.0]  # products: 9 against 8, which is noise, and starts agree
    assert weight_type(quantized_file, "cpu", torch.bfloat16, "auto") == "stored"
    times[0] = [1.0, 1.0, 10.0]
    assert weight_type(quantized_file, "cpu", torch.bfloat16, "auto") == "wide"
    assert "--weight-dtype auto: wide, because products are faster in bfloat16: " in caplog.text
    times[0], times[2] = [1.0, 1.0, 1.0], [0.9, 0.9, 0.9]  # torch is the fastest
    assert weight_type(quantized_file, "cpu", torch.bfloat16, "auto") == "wide"


@CPU
def test_a_joining_node_takes_what_the_cluster_takes(quantized_file, times, monkeypatch, caplog, tiny_gguf):
    """Without measuring, if it can."""
    caplog.set_level("INFO")
    times[0] = [9.0, 9.0, 9.0]
    assert weight_type(quantized_file, "cpu", torch.bfloat16, "auto", "stored") == "stored"
    assert "stored, because the cluster's nodes take these weights as they are stored" in caplog.text
    assert weight_type(quantized_file, "torch", torch.bfloat16, "auto", "stored") == "wide"  # it cannot
    times[0] = [1.0, 1.0, 1.0]
    assert weight_type(quantized_file, "cpu", torch.bfloat16, "auto", "wide") == "wide"
    assert weight_type(quantized_file, "triton", torch.bfloat16, "auto", "wide") == "wide"
    assert "wide, because the cluster's nodes widen these weights" in caplog.text
    assert weight_type(quantized_file, "cpu", torch.bfloat16, "auto", "int8") == "stored"  # measured


def test_the_backend_torch_computes_wide_weights(quantized_file, caplog):
    caplog.set_level("INFO")
    assert weight_type(quantized_file, "torch", torch.float32, "auto") == "wide"
    assert "wide, because the attention backend is torch" in caplog.text


def test_triton_computes_weights_as_stored(quantized_file, tiny_gguf, caplog):
    """No level of the CPU matters then."""
    caplog.set_level("INFO")
    assert weight_type(quantized_file, "triton", torch.bfloat16, "amx") == "stored"
    assert "--weight-dtype auto: stored, because Triton has products of q4_0; wide gives torch.bfloat16" in caplog.text
    assert weight_type(describe(str(tiny_gguf(name="plain.gguf"))), "triton", torch.bfloat16, "auto") == "wide"


def test_without_a_compiler_weights_are_wide(quantized_file, monkeypatch, caplog):
    def refuse(*_, **__):
        raise NotCompiled("no C++ compiler on PATH")

    monkeypatch.setattr(module, "CpuOps", refuse)
    caplog.set_level("INFO")
    for agreed in (None, "stored"):
        assert weight_type(quantized_file, "cpu", torch.float32, "auto", agreed) == "wide"
        assert "wide, because no C++ compiler on PATH" in caplog.text


def test_files_without_quantized_matrices_are_wide(tiny_gguf, quantized_file, times):
    assert weight_type(describe(str(tiny_gguf())), "cpu", torch.float32, "auto") == "wide"
    for other in (replace(quantized_file, format="safetensors"), replace(quantized_file, format="dummy")):
        assert weight_type(other, "cpu", torch.float32, "auto") == "wide"


def test_measured_are_the_largest_matrices_of_the_layers_but_not_more_than_takes_milliseconds():
    sizes = {"embed": (1000, 96), "layers.0.o": (96, 64), "layers.0.down": (96, 256), "layers.1.down": (256, 256)}
    kinds = {"embed": "q8_0", "layers.0.o": "q4_0", "layers.0.down": "q4_0", "layers.1.down": "q6_k"}
    assert weights_of_kinds(kinds, sizes) == {"q4_0": 96 * (64 + 256), "q6_k": 256 * 256}
    assert measured_shapes(kinds, sizes) == {"q4_0": (96, 256), "q6_k": (256, 256)}
    assert measured_shapes({"embed": "q8_0"}, sizes) == {"q8_0": (1000, 96)}  # nothing else is quantized
    ((outputs, inputs),) = measured_shapes({"layers.0.up": "q4_0"}, {"layers.0.up": (28672, 8192)}).values()
    assert inputs == 8192 and outputs % OUTPUTS == 0 and ELEMENTS / 2 < outputs * inputs <= ELEMENTS
    assert measured_shapes({"layers.0.up": "q4_0"}, {"layers.0.up": (128, 1 << 20)}) == {"q4_0": (OUTPUTS, 1 << 20)}
    assert measured_shapes({"layers.0.up": "q4_0"}, {"layers.0.up": (8, 64, 32)}) == {"q4_0": (64, 32)}  # experts


@CPU
def test_each_kind_counts_by_its_elements(monkeypatch):
    asked = []

    def seconds_of(among, weights, check):
        asked.append([(type(weight).__name__, weight.shape) for weight in weights])
        return [[1.0] * len(ROWS), [2.0] * len(ROWS)]

    monkeypatch.setattr(module, "seconds_of", seconds_of)
    shapes = {"q4_0": (64, 32), "q6_k": (64, 256)}
    elements = {"q4_0": 3 * 64 * 32, "q6_k": 64 * 256}
    assert times_of(TorchOps(), [TorchOps()], shapes, elements, torch.float32) == [[4.0] * 3, [8.0] * 3]
    assert asked == [[("Quantized", shape), ("Tensor", shape)] for shape in shapes.values()]


@CPU
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_real_measurement_of_every_kind(kind):
    """Constant matrices have only normal numbers, so they take as long as others."""
    shape = (64, 256)
    weight = constant(kind, shape, torch.float32)
    wide = weight.widened()
    assert tuple(weight.shape) == shape and wide.isfinite().all()
    assert (wide.abs() >= torch.finfo(torch.float32).tiny).all()
    stored = CpuOps("auto", torch.float32, products_of_kinds([kind]))
    if isinstance(weight, Quantized):
        assert weight.nbytes == math.prod(shape) // BLOCKS[kind][0] * BLOCKS[kind][1]
    found = times_of(stored, [TorchOps()], {kind: shape}, {kind: math.prod(shape)}, torch.float32)
    assert [len(each) for each in found] == [len(ROWS)] * 2 and all(0 < s < 60 for each in found for s in each)
