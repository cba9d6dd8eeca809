"""POST /v1/update_weights: a running cluster serves other weights; what runs ends with the old ones, and nothing of
their KV is found."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

from connect.store.distributed_store import MooncakeDistributedStore
from engine.checkpoint.model_source import describe
from engine.checkpoint.safetensors_weights import checkpoint_names
from engine.checkpoint.weights import DummyWeights
from lab.faults.checks import form
from lab.faults.client import Stream, opened, stream
from lab.launch import rest
from lab.launch.cluster import LocalCluster
from tests.e2e.conftest import Start, complete, model_of, settled, timeline, wait_until

SEED = 20261124
OTHER = 7
"""The seed of the other weights: those of a cluster that is started with --seed 7."""
LONG = 1500
PROMPT = [random.Random(SEED).randrange(1000, 40_000) for _ in range(200)]
FLAGS = ("--prefix-fetch", "always")


def tensors(model: list[str], seed: int) -> dict[str, torch.Tensor]:
    """What a trainer has: the tensors of a model under the names of checkpoints."""
    config = describe(model[1], "dummy", seed).config
    made = DummyWeights(config, seed)
    names = checkpoint_names(made.shapes(), config)
    return {names[ours][0]: made.read(ours) for ours in made.shapes()}


def ask(url: str, tokens: int = 8) -> tuple[list[int], int]:
    """Tokens of the answer, and prompt tokens that were found."""
    answer = complete(url, PROMPT, tokens, ignore_eos=True, return_token_ids=True)
    return answer["choices"][0]["token_ids"], timeline(url, answer["id"])["summary"]["cached_tokens"]


def update(url: str, prefix: str, **body: Any) -> dict[str, Any]:
    return rest.post(f"{url}/v1/update_weights", {"prefix": prefix, "version": prefix} | body)


def served(cluster: LocalCluster) -> dict[str, tuple[str, int, str | None]]:
    """Per node: version, sets of weights in memory, why it is behind."""
    states = {node.name: rest.get(f"{node.url}/v1/update_weights") for node in cluster.living}
    return {name: (state["version"], len(state["held"]), state["behind"]) for name, state in states.items()}


@pytest.fixture(scope="module")
def cluster(start: Start, tiny_model: list[str]) -> Iterator[LocalCluster]:
    role_flags = {"store": ["--dram-bytes", "256M"]}  # the other nodes are killed, and the tensors must survive that
    with start("prefill=1,decode=1,store=1", *tiny_model, *FLAGS, role_flags=role_flags) as running:
        yield running


@pytest.fixture(scope="module")
def others(cluster: LocalCluster, start: Start, tiny_model: list[str]) -> dict[int, list[int]]:
    """Tokens by the seed of the weights: of this cluster, which began with 0, and of one that is started with OTHER."""
    first, found = ask(cluster["decode-0"].url, LONG)
    assert found == 0
    settled(cluster)
    with start("mixed=1", *tiny_model, "--seed", str(OTHER)) as another:
        tokens = {0: first, OTHER: ask(another.nodes[0].url, LONG)[0]}
    assert tokens[0][:8] != tokens[OTHER][:8]
    return tokens


@pytest.fixture(scope="module")
def trainer(cluster: LocalCluster, tiny_model: list[str]) -> Iterator[Any]:
    """put(prefix, seed, changed=...) puts all tensors; `changed` maps names to other tensors, or None to leave out."""
    store = MooncakeDistributedStore()
    door = cluster["store-0"].url.removeprefix("http://")
    assert store.setup({"local_hostname": "localhost", "master_server_addr": door}) == 0
    made = cache(lambda seed: tensors(tiny_model, seed))

    def put(prefix: str, seed: int, **changed: torch.Tensor | None) -> None:
        given = {name: one for name, one in (made(seed) | changed).items() if one is not None}
        names = [prefix + name for name in given]
        assert set(store.batch_put_tensor(names, list(given.values()))) == {0}

    put.store = store  # type: ignore[attr-defined]
    yield put
    store.close()


def test_a_stream_ends_with_the_old_weights_and_the_next_request_begins_with_the_new(cluster, others, trainer):
    url = cluster["decode-0"].url
    warm, found = ask(url)
    assert (warm, found > 150) == (others[0][:8], True)
    trainer("new/", OTHER)

    async def during() -> tuple[Stream, dict[str, Any], tuple[list[int], int]]:
        into, body = Stream(), {"prompt": PROMPT, "max_tokens": LONG, "ignore_eos": True, "temperature": 0}
        async with opened() as session:
            running = asyncio.create_task(stream(session, [url], body | {"model": model_of(url)}, "long", into))
            while len(into.tokens) < 3 and not running.done():  # noqa: ASYNC110 - of a client
                await asyncio.sleep(0.002)
            told = await asyncio.to_thread(update, cluster["store-0"].url, "new/")
            after = await asyncio.to_thread(ask, url)
            begun = len(into.tokens)
            await running
        assert begun < LONG, "the stream ended before the weights were replaced: make it longer"
        return into, told, after

    into, told, after = asyncio.run(during())
    assert (into.error, into.tokens) == ("", others[0]), "the long answer has the tokens of the old weights"
    assert after == (others[OTHER][:8], 0), "no prefix of the old weights is found"
    assert set(told["nodes"]) == {"prefill-0", "decode-0"} and not told["late"] and told["generation"] == 1
    settled(cluster)
    assert ask(cluster["store-0"].url)[0] == others[OTHER][:8]
    settled(cluster)
    warm, found = ask(url)
    assert (warm, found > 150) == (others[OTHER][:8], True), "but one of the new weights"
    wait_until(lambda: served(cluster)["decode-0"] == ("new/", 1, None), "the old weights are dropped")
    for node in cluster.nodes:
        assert rest.get(f"{node.url}/v1/models")["data"][0]["weights_version"] == "new/"
        assert "mooncake:weights_generation{" in rest.text(f"{node.url}/metrics")
    settled(cluster)


@pytest.mark.parametrize(
    ("prefix", "name", "changed", "told"),
    [
        ("no/", "norm.weight", None, "1 of 29 (no/model.norm.weight) is missing"),
        ("flat/", "layers.1.self_attn.q_proj.weight", torch.zeros(64, 63), "weight [64, 63] instead of [64, 64]"),
        ("int/", "layers.2.mlp.up_proj.weight", torch.zeros(128, 64, dtype=torch.int8), "weight int8) is of an"),
    ],
    ids=["missing", "shape", "type"],
)
def test_wrong_tensors_change_nothing(cluster, trainer, prefix, name, changed, told):
    trainer(prefix, OTHER, **{f"model.{name}": changed})
    before = rest.get(f"{cluster['store-0'].url}/v1/update_weights")
    with pytest.raises(rest.RestError) as refused:
        update(cluster["decode-0"].url, prefix)
    assert refused.value.status == 400 and told in str(refused.value)
    assert rest.get(f"{cluster['store-0'].url}/v1/update_weights") == before
    assert {held for version, held, behind in served(cluster).values()} == {0, 1}


def test_the_same_weights_have_the_same_prefixes_again(cluster, others, trainer):
    """The root follows from the content: not from the name, nor from how often it was replaced."""
    url, found = cluster["prefill-0"].url, {}
    generation = rest.get(f"{url}/v1/update_weights")["generation"]
    for number, (prefix, seed) in enumerate((("x/", OTHER), ("y/", 0), ("z/", OTHER)), start=1):
        trainer(prefix, seed)
        assert update(url, prefix)["generation"] == generation + number
        tokens, found[prefix] = ask(url)
        assert tokens == others[seed][:8]
        settled(cluster)
    assert found["y/"] == 0, "what was put is not known to be the content of --model"
    assert found["z/"] > 150


def test_a_node_that_starts_later_serves_what_the_cluster_serves(cluster, others, trainer):
    trainer("later/", OTHER)
    update(cluster["prefill-0"].url, "later/")
    cluster.restart("decode-0")
    form(cluster)
    wait_until(lambda: served(cluster)["decode-0"] == ("later/", 1, None), "the weights of --model are dropped")
    assert ask(cluster["decode-0"].url)[0] == others[OTHER][:8]
    settled(cluster)


def test_a_node_that_lacks_the_tensors_is_not_ready_until_they_are_there(cluster, others, trainer):
    trainer("lost/", OTHER)
    update(cluster["decode-0"].url, "lost/")
    trainer.store.remove_by_regex("^lost/")
    url = cluster["prefill-0"].url
    cluster.repeat("prefill-0")
    wait_until(lambda: "29 of 29" in (behind(url) or ""), "the node says what is missing")
    with pytest.raises(rest.RestError) as unhealthy:
        rest.get(f"{url}/health")
    assert unhealthy.value.status == 503
    trainer("lost/", OTHER)
    wait_until(lambda: behind(url) is None, "the node has read them")
    form(cluster)
    assert ask(cluster["decode-0"].url)[0] == others[OTHER][:8]
    settled(cluster)


def behind(url: str) -> str | None:
    """Why the node lacks the weights; not yet, if it does not answer."""
    try:
        return rest.get(f"{url}/v1/update_weights")["behind"]
    except rest.RestError:
        return "it starts"
