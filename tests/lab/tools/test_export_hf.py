"""scripts/tools.py export-hf: what another engine loads is what ours computes with."""

from __future__ import annotations

import json

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.checkpoint.model_source import describe
from engine.checkpoint.weights import load
from engine.config.config import EMBEDDED_MODEL
from engine.text.tokenizer import Tokenizer
from lab.tools.export_hf import main

torch.set_num_threads(1)


def test_the_export_is_the_same_model(tmp_path, capsys):
    assert main([str(tmp_path / "hf")]) == 0
    directory = str(tmp_path / "hf")
    ours, theirs = describe(EMBEDDED_MODEL), describe(directory)
    here, there = load(ours, torch.bfloat16), load(theirs, torch.bfloat16)
    assert here.keys() == there.keys() and all(torch.equal(here[name], there[name]) for name in here)
    shape = ("num_layers", "num_heads", "num_kv_heads", "head_size", "rope_theta", "eos_token_ids", "bos_token_id")
    assert [getattr(ours.config, name) for name in shape] == [getattr(theirs.config, name) for name in shape]

    chat = [{"role": "user", "content": "What is the capital of France?"}]
    mine, tokenizer = Tokenizer.load(ours), AutoTokenizer.from_pretrained(directory)
    prompt = mine.chat(chat)
    assert prompt == tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert prompt == Tokenizer.load(theirs).chat(chat)

    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.dtype == torch.bfloat16 and json.loads((tmp_path / "hf" / "config.json").read_text())["rope_theta"]
    with torch.no_grad():
        answer = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=8)[0, len(prompt) :]
    assert mine.decode(answer.tolist()).startswith("The capital of France is Paris")


def test_int8_codes_are_the_nearest_of_each_output_channel(tmp_path):
    """The directory is one that our own loader takes as W8A8."""
    assert main([str(tmp_path / "hf"), "--int8"]) == 0
    source = describe(str(tmp_path / "hf"))
    assert source.quantization is not None and source.quantization.kind == "int8"
    here, there = load(describe(EMBEDDED_MODEL), torch.float32), load(source, torch.float32)
    assert here.keys() == there.keys()
    for name, wide in here.items():
        if wide.ndim == 2 and name.startswith("layers."):
            half_a_step = wide.to(torch.bfloat16).float().abs().amax(1, keepdim=True) / 254
            assert (there[name] - wide.to(torch.bfloat16).float()).abs().le(half_a_step * 1.001).all(), name


def test_a_directory_needs_no_export(tmp_path, capsys):
    assert main([str(tmp_path), "--model", "/nowhere/x.gguf"]) == 2
    assert "no such file" in capsys.readouterr().err
