"""Our engine on the embedded model says, token for token, what transformers says in float32.

Transformers reads the GGUF file by its own code (its own row permutation, names and dequantisation calls), so an error
in our loading cannot cancel out. It judges by one pass over prompt and answer: if at every position of our answer the
token is transformers' own greedy choice after the tokens before it, both answers are equal, by induction.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from attention.choice.choose import choose
from engine.checkpoint.safetensors_weights import our_name
from engine.model.decoder import Model
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import SamplingRow
from engine.step.runner import Row, Runner
from tests import transformers_answers

NEW_TOKENS = 20
BLOCK_SIZE = 16
NUM_BLOCKS = 400  # 6,400 tokens: all prompts below with their answers
CHUNK_TOKENS = 384
TIE = 1e-4
"""Two logits closer than this are a tie in float32: either answer is right."""

NEAR = 0.8
"""Twice the largest difference between bfloat16's and float32's logits of this model (0.39, measured)."""

LICENSE = (Path(__file__).parents[3] / "LICENSE").read_text()
CHATS = [
    "Hi",
    "What is the capital of France?",
    "Write a haiku about the sea, then explain each line in one sentence.",
    "Übersetze ins Englische: 'Der frühe Vogel fängt den Wurm.' 🐦 한국어도 할 수 있어요?",
]
RAW = [
    "Once upon a time",
    "def fibonacci(n):\n    ",
    "1, 1, 2, 3, 5, 8, 13,",
    "The three laws of thermodynamics state that",
    "La Tour Eiffel est située à",
    "SELECT name, COUNT(*) FROM users WHERE age > 30 GROUP BY",
]
LENGTHS = [1, 2, 15, 16, 17, 33, 64, 127, 400, 250, 700, 1500]
SOME = -3
"""prompts[:SOME]: without the last three, which take most of the time; the longest that remains needs two chunks."""


@pytest.fixture(scope="module")
def prompts(embedded_tokenizer) -> list[list[int]]:
    """23 prompts of 1 to 1,500 tokens: chats, raw text, and exact lengths around block borders."""
    turns = [{"role": "system", "content": "You answer in one word."}, {"role": "user", "content": "2 + 2?"}]
    turns += [{"role": "assistant", "content": "Four."}, {"role": "user", "content": "And 3 + 4?"}]
    chats = [turns, *([{"role": "user", "content": text}] for text in CHATS)]
    long = embedded_tokenizer.encode(LICENSE)
    return [
        *map(embedded_tokenizer.chat, chats),
        *map(embedded_tokenizer.encode, RAW),
        *(long[5 * i : 5 * i + length] for i, length in enumerate(LENGTHS)),
    ]


@pytest.fixture(scope="module")
def transformers_model() -> LlamaForCausalLM:
    return transformers_answers.load_model()


def runner_of(embedded, weights, backend: str, dtype: torch.dtype) -> Runner:
    config = embedded.config
    weights = {name: weight.to(dtype) for name, weight in weights.items()}
    model = Model(config, weights, choose(backend, "cpu", config.head_size))
    shape = (NUM_BLOCKS, config.num_layers, 2, config.num_kv_heads, BLOCK_SIZE, config.head_size)
    return Runner(model, torch.zeros(shape, dtype=dtype), BLOCK_SIZE)


@pytest.fixture(scope="module")
def runner(embedded, embedded_weights) -> Runner:
    return runner_of(embedded, embedded_weights, "auto", torch.float32)


def scattered_blocks(prompts: list[list[int]]) -> list[list[int]]:
    """Blocks for each prompt and its answer, in no order, none shared."""
    free = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(0)).tolist()
    return [[free.pop() for _ in range(-(-(len(ids) + NEW_TOKENS) // BLOCK_SIZE))] for ids in prompts]


def generate(runner: Runner, prompts: list[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
    """Greedy answers and the log probability of each of their tokens: prompts one by one in chunks, then all requests
    decode in one batch."""
    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)
    tokens, blocks = [list(ids) for ids in prompts], scattered_blocks(prompts)
    logprobs: list[list[float]] = [[] for _ in prompts]

    def step(starts: dict[int, tuple[int, int]]) -> None:
        """Computes tokens[start:end] of each request; those that reach their end get a token."""
        rows = []
        for i, (start, end) in starts.items():
            last = end == len(tokens[i])
            sampling = SamplingRow(greedy, list(tokens[i]), len(prompts[i])) if last else None
            rows.append(Row(tokens[i][start:end], start, blocks[i], sampling))
        for i, sampled in zip(starts, runner.step(rows), strict=True):
            for token in sampled:
                tokens[i].append(token.token_id)
                logprobs[i].append(token.logprobs.logprob)

    for i, ids in enumerate(prompts):
        for start in range(0, len(ids), CHUNK_TOKENS):
            step({i: (start, min(start + CHUNK_TOKENS, len(ids)))})
    for _ in range(NEW_TOKENS - 1):
        step({i: (len(ids) - 1, len(ids)) for i, ids in enumerate(tokens)})
    return [ids[len(prompt) :] for ids, prompt in zip(tokens, prompts, strict=True)], logprobs


@torch.inference_mode()
def assert_greedy(model: LlamaForCausalLM, prompt: list[int], answer: list[int], logprobs: list[float]) -> None:
    """`answer` is what `model` would say to `prompt`; stops at a tie, after which both may go their own way."""
    ids = torch.tensor([prompt + answer[:-1]])
    logits = model(ids, logits_to_keep=len(answer), use_cache=False).logits[0].float()
    theirs = logits.log_softmax(-1)
    for position, token in enumerate(answer):
        best = logits[position].topk(2)
        if token != best.indices[0]:
            gap = float(best.values[0] - best.values[1])
            print(f"prompt of {len(prompt)}, token {position}: {token}, transformers {best.indices[0]}, gap {gap:.2e}")
            assert token == best.indices[1] and gap < TIE
            return
        assert abs(float(theirs[position, token]) - logprobs[position]) < 1e-3


def test_weights_equal_transformers(embedded_weights, transformers_model):
    theirs = {our_name(name): tensor for name, tensor in transformers_model.state_dict().items()}
    for name, tensor in embedded_weights.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize(
    ("end", "count", "longest"), [(SOME, 20, CHUNK_TOKENS + 16), pytest.param(None, 23, 1500, marks=pytest.mark.heavy)]
)
def test_greedy_tokens_equal_transformers(runner, transformers_model, prompts, end, count, longest):
    prompts = prompts[:end]
    lengths = sorted(map(len, prompts))
    assert (len(prompts), lengths[0], lengths[-1]) == (count, 1, longest)
    answers, logprobs = generate(runner, prompts)
    for prompt, answer, its_logprobs in zip(prompts, answers, logprobs, strict=True):
        assert len(answer) == NEW_TOKENS
        assert_greedy(transformers_model, prompt, answer, its_logprobs)


def test_greedy_tokens_equal_transformers_generate(runner, transformers_model, prompts):
    """The same through transformers' own loop, for the chats: the induction above, checked."""
    chats = prompts[:5]
    answers, _ = generate(runner, chats)
    for prompt, answer in zip(chats, answers, strict=True):
        theirs = transformers_model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            eos_token_id=None,
            pad_token_id=2,
        )
        assert theirs[0, len(prompt) :].tolist() == answer


@pytest.mark.parametrize("name", transformers_answers.PROMPTS)
def test_the_answers_on_file_are_those_of_transformers(transformers_model, embedded_tokenizer, name):
    """tests/e2e holds nodes to the file."""
    prompt = embedded_tokenizer.encode(transformers_answers.PROMPTS[name])
    found, kept = transformers_answers.ask(transformers_model, name, prompt), transformers_answers.answers()[name]
    assert found.keys() == kept.keys()
    assert found["tokens"] == kept["tokens"] and len(found["tokens"]) == transformers_answers.NEW_TOKENS
    for column in found.keys() - {"tokens"}:
        assert found[column] == pytest.approx(kept[column], abs=1e-3)
        assert len(found[column]) == len(prompt) - 1


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_bfloat16_leaves_float32_only_near_ties(embedded, embedded_weights, transformers_model, prompts, backend):
    """Rounding decides between tokens whose float32 logits lie closer than bfloat16's own error, nowhere else: at the
    first token that is not float32's choice, the two are closer than NEAR."""
    chosen = [*prompts[:5], prompts[SOME - 1]]  # the chats, and one of two chunks: the second has a past
    answers, _ = generate(runner_of(embedded, embedded_weights, backend, torch.bfloat16), chosen)
    agreed = 0
    for prompt, answer in zip(chosen, answers, strict=True):
        with torch.inference_mode():
            ids = torch.tensor([prompt + answer[:-1]])
            logits = transformers_model(ids, logits_to_keep=len(answer), use_cache=False).logits[0].float()
        gaps = (logits.max(-1).values - logits.gather(1, torch.tensor(answer)[:, None])[:, 0]).tolist()
        first = next((i for i, gap in enumerate(gaps) if gap > 0), len(answer))
        assert first == len(answer) or gaps[first] < NEAR, f"token {first} of {len(prompt)}: {gaps[first]:.2f}"
        agreed += first
    assert agreed >= len(chosen) * NEW_TOKENS / 2


def test_the_capital_of_france(runner, embedded_tokenizer):
    """A sanity check a human can read."""
    prompt = embedded_tokenizer.chat([{"role": "user", "content": "What is the capital of France?"}])
    answers, _ = generate(runner, [prompt])
    assert embedded_tokenizer.decode(answers[0]).startswith("The capital of France is Paris.")
