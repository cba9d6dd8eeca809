"""What transformers says to a few prompts with the embedded model in float32, kept in transformers_answers.json.

tests/e2e holds real clusters to the file, and tests/engine/checkpoint/test_embedded.py holds the file to transformers,
which takes half a minute and a gigabyte. `python -m tests.transformers_answers` writes the file.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".json")
NEW_TOKENS = 16
STORY = (
    "In a small harbour town the tide comes in twice a day, and twice a day the old clock on the customs house is "
    "wound by whoever happens to pass. Nobody remembers who began this, but the clock has never stopped. "
)
PROMPTS = {
    "word": "Hello",
    "question": "The capital of France is",
    "code": "def fibonacci(n):\n    '''Return the n-th Fibonacci number.'''\n",
    "page": STORY * 6 + "One morning",
    "chapter": STORY * 16 + "The end of the story is that",
}
SCORED = ("page", "word")
"""Prompts with their own log probabilities."""


@cache
def answers() -> dict[str, dict[str, Any]]:
    """Name of the prompt -> "tokens": the greedy answer; of SCORED, "logprobs": of prompt[1:], and "best": of the most
    probable token at the same places."""
    found: dict[str, dict[str, Any]] = json.loads(FILE.read_text())
    return found


def load_model() -> Any:
    """The embedded model in transformers, float32, with weights it read itself."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    from engine.checkpoint.model_source import describe
    from engine.config.config import EMBEDDED_MODEL

    source = describe(EMBEDDED_MODEL)
    with torch.device("meta"):
        names_only = LlamaForCausalLM(LlamaConfig(num_hidden_layers=source.config.num_layers))
    loaded = load_gguf_checkpoint(str(source.path), return_tensors=True, model_to_load=names_only)
    model = LlamaForCausalLM(LlamaConfig(**loaded["config"])).eval()
    missing, unexpected = model.load_state_dict(loaded["tensors"], strict=False)
    assert missing == ["lm_head.weight"] and not unexpected and model.config.tie_word_embeddings
    return model


def ask(model: Any, name: str, prompt: list[int]) -> dict[str, Any]:
    """An entry of the file."""
    import torch

    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS)
        entry: dict[str, Any] = {"tokens": out[0, len(prompt) :].tolist()}
        if name in SCORED:
            logprobs = model(ids).logits[0].log_softmax(-1)[:-1]
            own = logprobs.gather(1, ids[0, 1:, None])[:, 0]
            entry["logprobs"] = [round(value, 5) for value in own.tolist()]
            entry["best"] = [round(value, 5) for value in logprobs.amax(-1).tolist()]
    return entry


def main() -> None:
    from engine.checkpoint.model_source import describe
    from engine.config.config import EMBEDDED_MODEL
    from engine.text.tokenizer import Tokenizer

    model, tokenizer = load_model(), Tokenizer.load(describe(EMBEDDED_MODEL))
    entries = {name: ask(model, name, tokenizer.encode(text)) for name, text in PROMPTS.items()}
    FILE.write_text(json.dumps(entries) + "\n")


if __name__ == "__main__":
    main()
