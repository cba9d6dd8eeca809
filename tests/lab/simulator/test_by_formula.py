"""Step models of published models: the formulas by hand, and clusters whose KV has several groups."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.groups import PoolRule
from lab.formulas.plan import Decode, Objective, Prefill, plan
from lab.formulas.roofs import apart_s, chunking_s, least_bandwidth, reuse_s
from lab.geometry.find import architecture
from lab.geometry.published import PUBLISHED
from lab.loads.trace import TraceRow
from lab.simulator.cluster import Cluster
from lab.simulator.config import SimConfig
from lab.simulator.models.by_formula import HARDWARE, by_formula
from lab.simulator.models.presets import preset, write_preset
from lab.simulator.models.step_models import LLAMA3_70B, roofline
from tests.lab.simulator.test_cluster import check
from tests.lab.simulator.test_plan import load

POOLED, NODE = PoolRule(state_every=8), HARDWARE["16xh200"]
MODELS = {model.name: by_formula(architecture(model.name), "16xh200", POOLED) for model in PUBLISHED}
LLAMA, K2, V3, OSS, GEMMA, NEXT = (
    MODELS[name] for name in ("Llama-3-70B", "Kimi-K2", "DeepSeek-V3", "gpt-oss-120b", "Gemma-3-27B", "Qwen3-Next-80B")
)


def test_a_uniform_model_is_as_it_was():
    """Apart from the embedding, which no token is multiplied with."""
    before = roofline("before", LLAMA3_70B, NODE)
    assert LLAMA.prefill == pytest.approx(before.prefill, rel=0.02)
    assert LLAMA.decode == pytest.approx(before.decode, rel=0.02)
    assert (LLAMA.token_bytes, LLAMA.kv_tokens) == (before.token_bytes, pytest.approx(before.kv_tokens, rel=0.01))
    for tokens in (1, 512, 100_000):
        assert LLAMA.held_tokens(tokens) == LLAMA.reused(tokens // 512 * 512, 512) + tokens % 512 == tokens
        assert LLAMA.handover_bytes(tokens) == LLAMA.fetch_bytes(tokens) == before.handover_bytes(tokens)
    assert LLAMA.block_bytes(512) == before.block_bytes(512)


def test_a_step_reads_the_experts_of_its_tokens():
    weights = architecture("Kimi-K2").weights
    assert K2.read_s(1) == pytest.approx(weights.active / NODE.hbm_bytes_s), "fp8: a byte for each"
    assert K2.read_s(2) > 1.2 * K2.read_s(1)
    assert K2.read_s(10_000) == K2.decode[0] == pytest.approx((weights.parameters - weights.embedding) / 61.44e12)
    assert K2.decode_s(1, 0) < K2.decode_s(64, 0) / 4
    assert K2.prefill_s(1, 0) >= K2.read_s(1) and K2.prompt_s(20_000, 0) > 2 * K2.prompt_s(8192, 0)
    assert K2.chunks_s([(300, 0), (200, 0)]) < K2.prefill_s(300, 0) + K2.prefill_s(200, 0), "they share the read"


def test_latent_attention_is_near_the_border():
    """128 heads on one row are bound by products, 64 by memory (242 and 121 FLOP per byte)."""
    bytes_s = 70_272 / NODE.hbm_bytes_s
    assert K2.decode[4] == pytest.approx(bytes_s)
    assert V3.decode[4] == pytest.approx(61 * 278_528 / NODE.flops) and V3.decode[4] > bytes_s


def test_windows_and_states_cost_each_request_the_same():
    sliding = 18 * 2048 * 128 / NODE.hbm_bytes_s
    assert OSS.decode[3] == pytest.approx(sliding) and OSS.decode[4] == pytest.approx(36_864 / NODE.hbm_bytes_s)
    assert NEXT.decode[3] == pytest.approx(2 * 77_266_944 / NODE.hbm_bytes_s)
    assert NEXT.held_tokens(1000) == 1000 + 3144 == 1000 + NEXT.fixed_tokens
    assert OSS.held_tokens(50) == 100 and OSS.held_tokens(5000) == 5127
    assert OSS.handover_bytes(8000) == 8000 * 36_864 + 127 * 36_864
    assert NEXT.fetch_bytes(8192) == 8192 * 24_576 + 77_266_944 and NEXT.fetch_bytes(8192, 8192) == 0


@given(name=st.sampled_from(sorted(MODELS)), new=st.integers(1, 60_000), context=st.integers(0, 60_000))
def test_a_prompt_is_its_chunks(name, new, context):
    model, begun, seconds = MODELS[name], 0, 0.0
    while begun < new:
        chunk = min(model.chunk_tokens, new - begun)
        seconds += model.prefill_s(chunk, context + begun)
        begun += chunk
    assert model.prompt_s(new, context) == pytest.approx(seconds)


@given(name=st.sampled_from(sorted(MODELS)), batch=st.integers(1, 200), tokens=st.integers(1, 4000))
def test_more_work_takes_longer(name, batch, tokens):
    model = MODELS[name]
    assert model.decode_s(batch, batch * tokens) <= model.decode_s(batch + 1, (batch + 1) * tokens)
    assert model.mixed_s([(tokens, 0)], batch, 0) >= max(model.prefill_s(tokens, 0), model.decode_s(batch, 0)) - 1e-9
    assert model.prompt_s(tokens, 0) <= model.prompt_s(tokens + 1, 0)


WRONG = [
    ("Kimi-K2", "8xa800", "GB of weights of Kimi-K2 do not fit into the 640 GB of 8xa800"),
    ("Llama-3-8B", "toaster", "'toaster' is not one of h200"),
]


@pytest.mark.parametrize(("model", "hardware", "words"), WRONG)
def test_what_runs_nowhere(model, hardware, words):
    with pytest.raises(ValueError, match=words):
        by_formula(architecture(model), hardware, POOLED)


def test_a_model_of_windows_alone_is_refused():
    model = architecture("Gemma-3-27B")
    with pytest.raises(ValueError, match="no group of Gemma-3-27B grows"):
        by_formula(replace(model, parts=model.parts[1:]), "h200", POOLED)


def test_a_file_has_no_groups(tmp_path):
    path = tmp_path / "model.json"
    write_preset(path, NEXT, {})
    with pytest.raises(ValueError, match="groups are read with --model-geometry"):
        preset(str(path))
    write_preset(path, replace(K2, kv=None), {})
    assert preset(str(path)) == replace(K2, kv=None)


def test_roofs_move_what_the_groups_need():
    assert least_bandwidth(NEXT, 131_072) < least_bandwidth(NEXT, 2048), "a state is worth more after more tokens"
    assert reuse_s(OSS, 100)[1] > reuse_s(replace(OSS, kv=None), 100)[1], "windows come on top"
    for model in (K2, GEMMA, NEXT):
        assert 0 < apart_s(model, 8192, 100, 0.1) < 10 and 0 < chunking_s(model, 8192, 100, 0.1) < 10


def test_a_plan_counts_windows_and_states():
    wanted, objective = load(40, found=0.5), Objective(5, 0.05)
    for model in (K2, GEMMA, NEXT):
        best = plan(model, wanted, objective, 1.0, 1.0).best
        assert best.prefill >= 1 and best.decode >= 1
    kept = replace(NEXT, kv_tokens=20_000)
    assert Decode(kept, wanted).fits(200, 0.9) and not Decode(kept, wanted).fits(2, 0.9)
    coarse = by_formula(architecture("Qwen3-Next-80B"), "16xh200", PoolRule(state_every=10_000))
    assert Prefill(coarse, wanted).offered > Prefill(NEXT, wanted).offered, "no prefix reaches a state"
    assert not Prefill(coarse, wanted).fetch.any()


def chats(turns: int = 6, users: int = 8) -> list[TraceRow]:
    """Each turn repeats what was said before: 10 more blocks each time."""

    def row(turn: int, user: int) -> TraceRow:
        blocks = [1000 * user + k for k in range(10 * turn + 11)]
        return TraceRow(2000.0 * turn + 40 * user, 5120 * (turn + 1) + 77, 60, blocks)

    return [row(turn, user) for turn in range(turns) for user in range(users)]


def ran(**fields: object) -> Cluster:
    config = SimConfig(**({"prefill": 2, "decode": 2, "hardware": "16xh200", "pool_blocks": 5000} | fields))
    cluster = Cluster(config).played(chats())
    check(cluster)
    return cluster


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_model_serves_a_cluster(name):
    cluster = ran(model_geometry=name)
    assert cluster.model == MODELS[name]
    assert sum(job.prefix_tokens for job in cluster.jobs) > 0


def test_a_prefix_of_a_model_with_states_ends_at_a_state():
    found = {every: ran(model_geometry="Qwen3-Next-80B", state_every=every) for every in (1, 8)}
    for every, cluster in found.items():
        assert all(job.prefix_tokens % (every * 512) == 0 for job in cluster.jobs)
    assert found[1].jobs[-1].prefix_tokens == 50 * 512 and found[8].jobs[-1].prefix_tokens == 48 * 512


def test_a_window_model_moves_its_windows_and_not_its_prompt():
    moved = {
        name: ran(model_geometry=name, cache_blocks=0, pool_blocks=0).network.bytes_moved
        for name in ("Gemma-3-27B", "Llama-3-70B")
    }
    tokens = [row.input_length for row in chats()]
    assert moved["Llama-3-70B"] == sum(tokens) * 327_680
    assert moved["Gemma-3-27B"] == sum(tokens) * 81_920 + len(tokens) * 1023 * 425_984


def test_windows_that_are_not_pooled_are_computed_again():
    """52 layers of 1,024 tokens: a prefix of 26,000 tokens has not one that helps; 18 layers of 128 need 2,286."""
    gemma = ran(model_geometry="Gemma-3-27B", pool_windows=False)
    assert {job.prefix_tokens for job in gemma.jobs} == {0}
    oss, whole = (ran(model_geometry="gpt-oss-120b", pool_windows=pooled) for pooled in (False, True))
    assert [job.prefix_tokens for job in oss.jobs[-8:]] == [(50 * 512 - 2286) // 512 * 512] * 8
    assert [job.prefix_tokens for job in whole.jobs[-8:]] == [50 * 512] * 8


def test_memory_holds_states_too():
    """Requests of 60 tokens, each with a state of 3,144 tokens' bytes: as many run together as states fit."""
    small = replace(NEXT, kv_tokens=10_000)
    rows = [TraceRow(float(i), 50, 200, [i]) for i in range(12)]
    cluster = Cluster(SimConfig(prefill=1, decode=1, output_lengths="oracle"), small).played(rows)
    check(cluster)
    begun, ended = ([(job.joined, 1) for job in cluster.jobs], [(job.finished, -1) for job in cluster.jobs])
    together = list(accumulate(change for _, change in sorted(begun + ended)))
    assert max(together) == 10_000 // (3144 + 250) == 2


def test_ssds_hold_blocks_of_one_size():
    with pytest.raises(ValueError, match=r"--ssd-blocks: .* has windows or states"):
        ran(model_geometry="gpt-oss-120b", ssd_blocks=100)
    assert ran(model_geometry="Kimi-K2", ssd_blocks=5000, pool_blocks=20).model.name == "Kimi-K2 on 16xh200"


def test_an_unknown_geometry_is_named():
    with pytest.raises(ValueError, match="--model-geometry: 'Kimi-K9' is neither"):
        ran(model_geometry="Kimi-K9")
