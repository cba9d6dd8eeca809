"""--weight-dtype auto: by the file, the attention backend, the kernels and the cluster."""

from __future__ import annotations

from dataclasses import replace

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from attention.cpu.level import levels_here
from engine.checkpoint.model_source import ModelSource, describe
from engine.loading import weight_type as module
from engine.loading.weight_type import weight_type
from net.compiled import NotCompiled

CPU = pytest.mark.skipif(not levels_here(), reason="CpuOps needs x86 with AVX2, or aarch64")


@pytest.fixture
def quantized_file(tiny_gguf) -> ModelSource:
    held = {
        name: (gguf.quantize(v, Type.Q4_0), Type.Q4_0) if v.ndim == 2 else v for name, v in tiny_gguf.tensors().items()
    }
    return describe(str(tiny_gguf(held)))


@CPU
def test_the_level_decides_and_every_start_agrees(quantized_file, monkeypatch, caplog):
    caplog.set_level("INFO")
    expected = "stored" if levels_here()[0] in module.FASTER else "wide"
    assert {weight_type(quantized_file, "cpu", torch.bfloat16, "auto") for _ in range(5)} == {expected}
    assert f"--weight-dtype auto: {expected}, because products " in caplog.text
    monkeypatch.setattr(module, "FASTER", ())
    assert weight_type(quantized_file, "cpu", torch.bfloat16, "auto") == "wide"
    assert f"wide, because products of level {levels_here()[0]} are faster in bfloat16" in caplog.text


@CPU
def test_a_joining_node_takes_what_the_cluster_takes(quantized_file, monkeypatch, caplog):
    """If it can."""
    caplog.set_level("INFO")
    monkeypatch.setattr(module, "FASTER", ())
    assert weight_type(quantized_file, "cpu", torch.bfloat16, "auto", "stored") == "stored"
    assert "stored, because the cluster's nodes take these weights as they are stored" in caplog.text
    assert weight_type(quantized_file, "torch", torch.bfloat16, "auto", "stored") == "wide"  # it cannot
    monkeypatch.undo()
    assert weight_type(quantized_file, "cpu", torch.bfloat16, "auto", "wide") == "wide"
    assert weight_type(quantized_file, "triton", torch.bfloat16, "auto", "wide") == "wide"
    assert "wide, because the cluster's nodes widen these weights" in caplog.text


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


def test_files_without_quantized_matrices_are_wide(tiny_gguf, quantized_file):
    assert weight_type(describe(str(tiny_gguf())), "cpu", torch.float32, "auto") == "wide"
    for other in (replace(quantized_file, format="safetensors"), replace(quantized_file, format="dummy")):
        assert weight_type(other, "cpu", torch.float32, "auto") == "wide"
