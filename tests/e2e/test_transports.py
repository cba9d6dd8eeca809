"""KV over TCP gives the same tokens as KV in shared memory, and each request says which it was."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import Start, complete, settled, timeline


@pytest.fixture(scope="module")
def alone(start: Start, tiny_model) -> str:
    with start("mixed=1", *tiny_model) as cluster:
        return complete(cluster.nodes[0].url, list(range(100, 400)), 24, ignore_eos=True)["choices"][0]["text"]


@pytest.mark.parametrize(("transport", "block_size"), [("shm", "32"), ("tcp", "16")])
def test_kv_travels(start: Start, tiny_model, alone, transport, block_size, tmp_path):
    flags = ["--transport", transport, "--block-size", block_size, "--prefix-fetch", "always"]
    if transport == "tcp":  # sealed
        key = tmp_path / "key"
        key.write_text("5c" * 32)
        flags += ["--cluster-key-file", str(key)]
    with start("prefill=1,decode=1,store=1", *tiny_model, *flags) as cluster:
        url = cluster["decode-0"].url
        first = complete(url, list(range(100, 400)), 24, ignore_eos=True)
        assert first["choices"][0]["text"] == alone
        assert list(timeline(url, first["id"])["summary"]["bytes_moved"]) == [transport]
        settled(cluster)
        cluster.restart("prefill-0")  # the prefix comes back from the store, by the same transport
        again = complete(url, list(range(100, 400)), 24, ignore_eos=True)
        assert again["choices"][0]["text"] == alone
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 299 // int(block_size) * int(block_size)
        assert list(timeline(url, again["id"])["summary"]["bytes_moved"]) == [transport]
        settled(cluster)
