"""What the checks of our own connector read of vLLM's metrics."""

from __future__ import annotations

from lab.foreign.vllm.own import sums

TEXT = """# HELP vllm:kv_cache_usage_perc KV-cache usage.
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="m",source="host"} 896.0
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="m",source="disk"} 0.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 2.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 3.0
python_info{version="3.11"} 1.0
"""


def test_metrics_are_summed_over_labels_but_not_over_sources():
    assert sums(TEXT) == {
        "vllm:kv_cache_usage_perc": 0.25,
        "vllm:prompt_tokens_cached_by_source_total host": 896.0,
        "vllm:prompt_tokens_cached_by_source_total disk": 0.0,
        "vllm:request_success_total": 5.0,
    }
