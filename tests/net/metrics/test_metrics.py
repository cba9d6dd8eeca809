from __future__ import annotations

import re
import threading
from collections import Counter
from pathlib import Path

import pytest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from net.metrics.events import Metrics
from net.metrics.table import declared, size_buckets
from net.metrics.watched import (
    Watched,
    of_experts,
    of_gossip,
    of_load_words,
    of_offload,
    of_store,
    of_tenants,
    of_tiers,
    of_traces,
)

LABELS = {"model_name": "tiny", "engine": "node-1"}


def value(metrics: Metrics, sample: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(sample, LABELS | labels)


@pytest.fixture
def metrics():
    return Metrics("tiny", "node-1", max_model_len=8192)


def test_every_sample_parses_and_carries_the_node(metrics):
    metrics.finish_request("stop", 1.5, 10, 5, 0.4)
    metrics.set("mooncake:cluster_members", 1, role="prefill")
    families = list(text_string_to_metric_families(metrics.text().decode()))
    samples = [sample for family in families for sample in family.samples]
    assert samples
    assert all(sample.labels["engine"] == "node-1" and sample.labels["model_name"] == "tiny" for sample in samples)
    assert all(family.documentation for family in families)


def test_unlabelled_metrics_start_at_zero(metrics):
    for name in ("prompt_tokens", "generation_tokens", "num_preemptions", "prefix_cache_queries", "prefix_cache_hits"):
        assert value(metrics, f"vllm:{name}_total") == 0
    assert value(metrics, "vllm:num_requests_running") == 0


def test_load(metrics):
    metrics.set_load(3, 2, 0.25)
    assert value(metrics, "vllm:num_requests_running") == 3
    assert value(metrics, "vllm:num_requests_waiting") == 2
    assert value(metrics, "vllm:kv_cache_usage_perc") == 0.25


def test_waiting_by_class(metrics):
    metrics.set("mooncake:requests_waiting", 1, service_class="interactive")
    metrics.set("mooncake:requests_waiting", 7, service_class="batch")
    assert value(metrics, "mooncake:requests_waiting", service_class="batch") == 7


def test_cache_config_is_replaced_not_doubled(metrics):
    metrics.set_cache_config({"block_size": 16, "cache_dtype": "float32"})
    metrics.set_cache_config({"block_size": 32, "cache_dtype": "float32"})
    assert value(metrics, "vllm:cache_config_info", block_size="32", cache_dtype="float32") == 1
    assert metrics.text().count(b"\nvllm:cache_config_info{") == 1


def test_a_counter_grows_by_the_amount(metrics):
    metrics.count("vllm:prefix_cache_queries", 100)
    metrics.count("vllm:prefix_cache_queries", 50)
    metrics.count("vllm:num_preemptions")
    assert value(metrics, "vllm:prefix_cache_queries_total") == 150
    assert value(metrics, "vllm:num_preemptions_total") == 1


def test_every_declared_metric_is_filled_by_its_name_in_the_code():
    """And no other name is: a wrong one would raise KeyError when something happens, perhaps rarely."""
    root = Path(__file__).resolve().parents[3]
    code = "".join(path.read_text() for room in ("engine", "net") for path in (root / room).rglob("*.py"))
    filled = set(re.findall(r"\.(?:_child|count|observe|set)\(\s*\"((?:vllm|mooncake):\w+)\"", code))
    assert filled == {one.name for one in declared(100)}


def test_a_request_from_arrival_to_end(metrics):
    metrics.observe_ttft(0.3, "batch")
    for _ in range(4):
        metrics.observe_itl(0.1, "standard")
    metrics.finish_request("length", 0.7, 10, 5, 0.4)
    assert value(metrics, "vllm:request_success_total", finished_reason="length") == 1
    assert value(metrics, "vllm:time_to_first_token_seconds_sum") == pytest.approx(0.3)
    name = "mooncake:time_to_first_token_seconds_sum"
    assert value(metrics, name, service_class="batch") == pytest.approx(0.3)
    assert value(metrics, "vllm:inter_token_latency_seconds_count") == 4
    assert value(metrics, "vllm:request_time_per_output_token_seconds_sum") == pytest.approx(0.1)
    assert value(metrics, "vllm:e2e_request_latency_seconds_sum") == pytest.approx(0.7)
    assert value(metrics, "vllm:request_prompt_tokens_sum") == 10
    assert value(metrics, "vllm:request_generation_tokens_sum") == 5


def test_one_token_has_no_time_per_output_token(metrics):
    metrics.finish_request("stop", 0.3, 10, 1, 0.0)
    assert value(metrics, "vllm:request_time_per_output_token_seconds_count") == 0


def test_cluster_transfers_and_store(metrics):
    metrics.set("mooncake:cluster_members", 2, role="prefill")
    metrics.count_transfer("write", "shm", 1000, 0.5)
    metrics.count("mooncake:transfer_failures", transport="tcp")
    metrics.count_prefix_load({"dram": 3, "ssd": 1}, 2)
    metrics.observe("vllm:iteration_tokens_total", 64)
    assert value(metrics, "mooncake:cluster_members", role="prefill") == 2
    assert value(metrics, "mooncake:transfer_bytes_total", direction="write", transport="shm") == 1000
    assert value(metrics, "mooncake:transfer_seconds_total", direction="write", transport="shm") == 0.5
    assert value(metrics, "mooncake:transfer_failures_total", transport="tcp") == 1
    assert value(metrics, "mooncake:store_hit_blocks_total", tier="ssd") == 1
    assert value(metrics, "mooncake:store_missed_blocks_total") == 2
    assert value(metrics, "vllm:iteration_tokens_total_sum") == 64


def test_two_nodes_in_one_process():
    one, two = Metrics("tiny", "a"), Metrics("tiny", "b")
    one.count("mooncake:requests_resumed")
    assert two.registry.get_sample_value("mooncake:requests_resumed_total", {"model_name": "tiny", "engine": "b"}) == 0


def test_size_buckets():
    assert size_buckets(100) == (1, 2, 5, 10, 20, 50, 100)
    assert size_buckets(30) == (1, 2, 5, 10, 20)


def test_load_words_tell_which_way_they_went(metrics):
    counters = {"read_one_sided": 3, "claimed_message": 2, "torn": 1}
    metrics.watch(of_load_words(counters))
    counters["read_one_sided"] += 1
    metrics.read()

    def told(operation, way):
        return value(metrics, "mooncake:load_words_total", operation=operation, way=way)

    assert (told("read", "one_sided"), told("claimed", "message"), told("torn", "one_sided")) == (4, 2, 1)


def test_what_others_count_is_as_of_the_last_read(metrics):
    traffic, lost, counters = {"sent": (2, 100)}, Counter({"dead": 1}), {"refutations": 3, "local_health": 1}
    tier = {"blocks": 2, "bytes": 20, "capacity": 10, "hits": 7, "corrupt": 1}
    metrics.watch(of_gossip(traffic, lambda: counters, lost, lambda: 0.5))
    metrics.watch(of_tiers(lambda: {"ssd": tier}, 10))
    tenants = {"a": {"bytes": 30, "quota": 40, "refused": 2}, "other": {"bytes": 5, "quota": None, "refused": 0}}
    metrics.watch(of_tenants(lambda: tenants))
    metrics.watch(of_store(lambda: {"corrupt": 4, "home_failures": 5}))
    metrics.watch(of_traces(lambda: 6, lambda: 7))
    counts = {"times_masked": 3, "dropped_pairs": 5, "moved_experts": 8, "waited_s": 0.5}
    experts = {"ranks": 2, "masked": {"1": "why"}, "pairs_by_rank": [10, 11], "choices_by_expert": [4, 17]}
    metrics.watch(of_experts(lambda: experts | counts))
    metrics.watch(of_offload(lambda: {"streamed_layers": 12, "memory_bytes": 90, "bytes_read": 70, "waited_s": 0.25}))
    assert value(metrics, "mooncake:gossip_packets_total", direction="sent") is None
    metrics.read()
    lost["dead"] += 1
    assert value(metrics, "mooncake:gossip_packets_total", direction="sent") == 2
    assert value(metrics, "mooncake:gossip_bytes_total", direction="sent") == 100
    assert value(metrics, "mooncake:gossip_events_total", event="refutations") == 3
    assert value(metrics, "mooncake:gossip_events_total", event="local_health") is None
    assert value(metrics, "mooncake:gossip_local_health") == 1
    assert value(metrics, "mooncake:gossip_oldest_record_seconds") == 0.5
    assert value(metrics, "mooncake:members_lost_total", reason="dead") == 1
    assert value(metrics, "mooncake:store_used_bytes", tier="ssd") == 20
    assert value(metrics, "mooncake:store_capacity_bytes", tier="ssd") == 100
    assert value(metrics, "mooncake:store_tier_events_total", tier="ssd", event="hits") == 7
    assert value(metrics, "mooncake:store_tenant_bytes", tenant="other") == 5
    assert value(metrics, "mooncake:store_tenant_quota_bytes", tenant="a") == 40
    assert value(metrics, "mooncake:store_tenant_quota_bytes", tenant="other") is None
    assert value(metrics, "mooncake:store_tenant_refusals_total", tenant="a") == 2
    assert value(metrics, "mooncake:store_faults_total", fault="damaged") == 4
    assert value(metrics, "mooncake:otlp_lost_traces_total") == 6
    assert value(metrics, "mooncake:otlp_spans_total") == 7
    assert [value(metrics, "mooncake:expert_rank_masked", rank=rank) for rank in "01"] == [0, 1]
    assert value(metrics, "mooncake:expert_pairs_total", rank="1") == 11
    assert value(metrics, "mooncake:expert_choices_total", expert="1") == 17
    assert value(metrics, "mooncake:expert_dropped_pairs_total") == 5
    assert value(metrics, "mooncake:offload_layers") == 12 and value(metrics, "mooncake:offload_memory_bytes") == 90
    assert value(metrics, "mooncake:offload_read_bytes_total") == 70
    assert value(metrics, "mooncake:offload_wait_seconds_total") == 0.25


OF_VLLM = {  # what vLLM's own dashboard asks for (examples/observability/prometheus_grafana, of 2026), without labels
    *("e2e_request_latency_seconds_bucket", "prompt_tokens_total", "generation_tokens_total"),
    *("inter_token_latency_seconds_bucket", "num_requests_running", "num_requests_waiting"),
    *("time_to_first_token_seconds_bucket", "kv_cache_usage_perc", "request_prompt_tokens_bucket"),
    *("request_generation_tokens_bucket", "request_queue_time_seconds_sum", "request_prefill_time_seconds_sum"),
    *("request_decode_time_seconds_sum", "request_max_num_generation_tokens_sum"),
}
OF_ITS_ROUTER = {  # production stack, src/vllm_router/stats/engine_stats.py
    *("num_requests_running", "num_requests_waiting", "gpu_cache_usage_perc"),
    *("gpu_prefix_cache_hits_total", "gpu_prefix_cache_queries_total"),
}


def test_what_stock_dashboards_and_routers_read(metrics):
    metrics.set_load(1, 2, 0.75)
    metrics.count("vllm:prefix_cache_hits", 64)
    metrics.observe_itl(0.2, "interactive")
    families = text_string_to_metric_families(metrics.text().decode())
    shown = {sample.name.removeprefix("vllm:"): sample.value for family in families for sample in family.samples}
    assert set(shown) >= OF_VLLM | OF_ITS_ROUTER
    assert (shown["gpu_cache_usage_perc"], shown["gpu_prefix_cache_hits_total"]) == (0.75, 64)
    assert shown["time_per_output_token_seconds_sum"] == pytest.approx(0.2)


def test_a_scrape_in_a_thread_asks_no_owner(metrics):
    """Snapshots handle the notices of peers: two threads in one poll were a RuntimeError, and a request failed."""
    threads: set[int] = set()

    def asked(*answer):
        threads.add(threading.get_ident())
        return list(answer)

    metrics.watch_transfers(asked)
    metrics.watch([Watched(CounterMetricFamily, "mooncake:x", "x", (), lambda: asked(((), 1.0)))])
    metrics.read()
    scrape = threading.Thread(target=metrics.text)
    scrape.start()
    scrape.join()
    assert threads == {threading.get_ident()}
