"""transformers' continuous batching on the same geometry, with its own random weights."""

from __future__ import annotations

import time

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from engine.model.model_config import ModelConfig

SHORT, LONG = 8, 40
"""New tokens of the two runs. Their difference is LONG - SHORT decode steps, without prefill and start-up."""


def decode_step_seconds(config: ModelConfig, batch: int, context: int, device: str = "cuda") -> float:
    """Seconds per step with `batch` requests whose prompts have `context` tokens."""
    model = llama(config, device)
    prompts = torch.randint(config.vocab_size, (batch, context)).tolist()
    generate(model, prompts, SHORT)  # compiles, and fills caches
    times = []
    for new_tokens in (SHORT, LONG):
        began = time.perf_counter()
        generate(model, prompts, new_tokens)
        times.append(time.perf_counter() - began)
    return (times[1] - times[0]) / (LONG - SHORT)


def llama(config: ModelConfig, device: str) -> LlamaForCausalLM:
    theirs = LlamaConfig(
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_size,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters={"rope_theta": config.rope_theta, "rope_type": "default"},
        tie_word_embeddings=config.tie_word_embeddings,
        dtype=torch.bfloat16,
    )
    theirs._attn_implementation = "sdpa"
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model: LlamaForCausalLM = LlamaForCausalLM(theirs).eval().requires_grad_(False)
            return model
    finally:
        torch.set_default_dtype(before)


def generate(model: LlamaForCausalLM, prompts: list[list[int]], new_tokens: int) -> None:
    """Raises RuntimeError if a request got fewer tokens than requested."""
    wanted = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    outputs = model.generate_batch(prompts, generation_config=wanted, progress_bar=False)
    short = [key for key, output in outputs.items() if len(output.generated_tokens) < new_tokens]
    if short or len(outputs) != len(prompts):
        raise RuntimeError(f"{len(short)} of {len(outputs)} requests got fewer than {new_tokens} tokens")
