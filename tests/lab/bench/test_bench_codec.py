"""The coder on real KV: one small run, whose ratios and sizes do not depend on the machine's speed."""

from __future__ import annotations

import orjson
import pytest

from lab.bench.codec import Measured, general, main


def test_kv_of_the_embedded_model_becomes_shorter(tmp_path):
    out = tmp_path / "codec.json"
    assert main(["--tokens", "64", "--json", str(out)]) == 0
    rows = {(row["case"], row["metric"]): row for row in orjson.loads(out.read_bytes())["rows"]}
    for case, most in (("KV in bfloat16", 0.75), ("KV in float32", 0.9)):
        ratio = rows[case, "bytes after / before"]
        assert 0.5 < ratio["ours"] < most and "zlib 1" in ratio["peers"]
        for metric in ("encode", "decode"):
            assert rows[case, metric]["ours"] > 0 and rows[case, metric]["limits"]["memcpy"] > 0
        assert rows[case, "KV over 10 Gbit/s, overlapped"]["limits"] == {"line rate": 1.25}
        paced = rows[case, "KV over a paced link of 1 Gbit/s"]
        assert paced["limits"] == {"line rate": 0.125} and paced["ours"] > 0 < paced["peers"]["raw"]
    sizes = {name: rows[f"pool {name}", "bytes per block"] for name in ("int8", "int4")}
    assert sizes["int4"]["ours"] < 0.7 * sizes["int8"]["ours"]


def test_rates_over_a_link():
    coder = Measured(ratio=0.5, encode=4e9, decode=8e9)
    assert coder.in_turns(1e9) == pytest.approx(1 / (0.25e-9 + 0.5e-9 + 0.125e-9))
    assert coder.overlapped(1e9) == 2e9 and coder.overlapped(100e9) == 4e9


def test_all_coders_get_the_same_frames():
    frames, seen = [memoryview(bytes([i]) * 8) for i in range(9)], []

    def pack(frame):
        seen.append(bytes(frame))
        return bytes(4)

    assert general(frames, pack, lambda coded: coded).ratio == 0.5
    assert set(seen) == {bytes(frame) for frame in frames}


def test_too_few_tokens(capsys):
    assert main(["--tokens", "5"]) == 2
    assert "--tokens 5" in capsys.readouterr().err
