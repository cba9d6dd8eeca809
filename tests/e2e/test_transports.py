"""KV over sealed TCP gives the tokens of one node, and each request says how it moved. Nodes of one host take shared
memory by themselves: test_same_tokens.py."""

from __future__ import annotations

from tests.e2e.conftest import Start, complete, settled, timeline

PROMPT = list(range(100, 400))


def test_kv_travels(start: Start, tiny_model, tmp_path):
    key = tmp_path / "key"
    key.write_text("5c" * 32)
    flags = ["--transport", "tcp", "--prefix-fetch", "always", "--cluster-key-file", str(key)]
    with start("mixed=1", *tiny_model) as cluster:
        alone = complete(cluster.nodes[0].url, PROMPT, 24, ignore_eos=True)["choices"][0]["text"]
    with start("prefill=1,decode=1,store=1", *tiny_model, *flags) as cluster:
        url = cluster["decode-0"].url
        first = complete(url, PROMPT, 24, ignore_eos=True)
        assert first["choices"][0]["text"] == alone
        assert list(timeline(url, first["id"])["summary"]["bytes_moved"]) == ["tcp"]
        settled(cluster)
        cluster.restart("prefill-0")  # the prefix comes back from the store, by the same transport
        again = complete(url, PROMPT, 24, ignore_eos=True)
        assert again["choices"][0]["text"] == alone
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 299 // 16 * 16
        assert list(timeline(url, again["id"])["summary"]["bytes_moved"]) == ["tcp"]
        settled(cluster)
