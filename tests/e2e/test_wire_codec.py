"""KV in coded frames (--wire-codec): the tokens of one node, and fewer bytes on the wire, by the metrics."""

from __future__ import annotations

import urllib.request

from tests.e2e.conftest import Start, complete, settled, timeline

PROMPT, OTHER = list(range(100, 500)), list(range(3000, 3400))
COUNT = 24
BFLOAT16 = ("--kv-cache-dtype", "bfloat16")
BLOCK_BYTES = 3 * 2 * 2 * 16 * 16 * 2  # of the tiny model, in bfloat16
BLOCKS = len(PROMPT) // 16


def coded(url: str) -> dict[str, dict[str, float]]:
    """Bytes of coded frames by direction and form, by the metrics of the node since its start."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    found: dict[str, dict[str, float]] = {"sent": {}, "received": {}}
    for line in lines:
        if line.startswith("mooncake:wire_codec_bytes_total"):
            labels = dict(label.split("=", 1) for label in line[line.index("{") + 1 : line.index("}")].split(","))
            found[labels["direction"].strip('"')][labels["form"].strip('"')] = float(line.split()[-1])
    return found


def test_equal_tokens_from_fewer_bytes(start: Start, tiny_model):
    with start("mixed=1", *tiny_model, *BFLOAT16) as cluster:
        node = cluster.nodes[0].url
        alone = [complete(node, ids, COUNT, ignore_eos=True)["choices"][0]["text"] for ids in (PROMPT, OTHER)]
    flags = ("--transport", "tcp", "--prefix-fetch", "always", "--wire-codec", "exponent")
    with start("prefill=1,decode=1,store=1", *tiny_model, *BFLOAT16, *flags) as cluster:
        url, prefill = cluster["decode-0"].url, cluster["prefill-0"].url

        def answer(prompt: list[int] = PROMPT) -> dict[str, dict[str, object]]:
            """The details of its events by name; the text is that of one node."""
            body = complete(url, prompt, COUNT, ignore_eos=True)
            assert body["choices"][0]["text"] == alone[prompt is OTHER]
            settled(cluster)
            return {event["event"]: event["detail"] for event in timeline(url, body["id"])["events"]}

        moved = answer()["kv_moved"]
        assert (moved["transport"], moved["bytes"]) == ("tcp", BLOCKS * BLOCK_BYTES), "of KV, however it travels"
        sent, received = coded(prefill)["sent"], coded(url)["received"]
        assert sent["raw"] >= received["raw"] >= 0.9 * BLOCKS * BLOCK_BYTES, "the hand-over, and blocks for the pool"
        assert 0 < sent["wire"] < 0.8 * sent["raw"] and 0 < received["wire"] < 0.8 * received["raw"]
        assert coded(cluster["store-0"].url)["received"]["raw"] > 0, "puts are coded"

        prefill = cluster.restart("prefill-0", *flags, "--kv-transfer", "pull").url
        fetched = answer()["prefix_fetched"]
        assert fetched["bytes"] == (len(PROMPT) - 1) // 16 * BLOCK_BYTES
        assert coded(prefill)["received"]["raw"] >= 0.9 * fetched["bytes"], "what comes from the pool is coded"
        assert coded(prefill)["received"]["wire"] < 0.8 * coded(prefill)["received"]["raw"]
        assert answer(OTHER)["kv_moved"]["how"] == "pull"
        assert coded(prefill)["sent"]["raw"] >= 0.9 * BLOCKS * BLOCK_BYTES, "and what the decode node pulls"

        prefill = cluster.restart("prefill-0", "--wire-codec", "none").url
        before = coded(url)
        answer()
        assert coded(prefill) == {"sent": {}, "received": {}} and coded(url) == before, "both nodes must have a coder"
