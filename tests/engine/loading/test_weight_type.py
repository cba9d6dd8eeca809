"""--weight-dtype auto: by the file, the attention backend, the kernels and the CPU's level."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from engine.checkpoint.model_source import ModelSource, describe
from engine.loading import weight_type as module
from engine.loading.weight_type import FASTER, weight_type
from net.compiled import NotCompiled


@pytest.fixture
def quantized_file(tiny_gguf) -> ModelSource:
    held = {
        name: (gguf.quantize(v, Type.Q4_0), Type.Q4_0) if v.ndim == 2 else v for name, v in tiny_gguf.tensors().items()
    }
    return describe(str(tiny_gguf(held)))


def with_level(monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    monkeypatch.setattr(module, "CpuOps", lambda *_, **__: SimpleNamespace(level=level))


@pytest.mark.parametrize("level", FASTER)
def test_a_quantized_file_stays_as_stored_at_a_fast_level(quantized_file, monkeypatch, caplog, level):
    with_level(monkeypatch, level)
    caplog.set_level("INFO")
    assert weight_type(quantized_file, "cpu", torch.bfloat16, "auto") == "stored"
    assert "--weight-dtype auto: stored, because products are faster with q4_0" in caplog.text


@pytest.mark.parametrize("level", ["amx", "neon"])
def test_other_levels_widen(quantized_file, monkeypatch, caplog, level):
    with_level(monkeypatch, level)
    caplog.set_level("INFO")
    assert weight_type(quantized_file, "cpu", torch.bfloat16, "auto") == "wide"
    assert f"wide, because products of level {level} are faster in bfloat16" in caplog.text


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
    assert weight_type(quantized_file, "cpu", torch.float32, "auto") == "wide"
    assert "wide, because no C++ compiler on PATH" in caplog.text


def test_files_without_quantized_matrices_are_wide(tiny_gguf, quantized_file, monkeypatch):
    with_level(monkeypatch, FASTER[0])
    assert weight_type(describe(str(tiny_gguf())), "cpu", torch.float32, "auto") == "wide"
    for other in (replace(quantized_file, format="safetensors"), replace(quantized_file, format="dummy")):
        assert weight_type(other, "cpu", torch.float32, "auto") == "wide"
