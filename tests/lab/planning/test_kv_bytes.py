"""scripts/tools.py kv-bytes: its figures against numbers by hand, its table, and words for what is wrong."""

from __future__ import annotations

import orjson

from lab.geometry.published import PUBLISHED
from lab.planning import kv_bytes


def figures(tmp_path, *arguments: str) -> dict[tuple[str, str], tuple[int, int]]:
    """(case, metric) -> bytes (ours, uniform); dividing by 2^20 loses no digit"""
    out = tmp_path / "out.json"
    assert kv_bytes.main([*arguments, "--json", str(out)]) == 0
    rows = orjson.loads(out.read_bytes())["rows"]
    mib = kv_bytes.MIB
    return {(row["case"], row["metric"]): (mib * row["ours"], mib * row["peers"]["uniform"]) for row in rows}


def test_all_published_models(tmp_path, capsys):
    found = figures(tmp_path)
    printed = capsys.readouterr().out
    assert all(f"{model.name} ({model.source})" in printed for model in PUBLISHED)
    assert "latent, 61 layers: 70,272 bytes per token" in printed
    assert "state, 36 layers: 77,266,944 bytes per state" in printed
    assert found["Llama-3-70B, 8,192 tokens, all", "pool"] == (8192 * 327_680,) * 2
    assert found["Kimi-K2, 8,192 tokens, all", "arena and transfer"] == (8192 * 70_272, 8192 * 2_498_560)


def test_windows_by_hand(tmp_path):
    """Blocks of 16: at 8,192 tokens the last 127 lie in 8 blocks; a chunk of 1,024 and the 127 before it in 72."""
    found = figures(tmp_path, "GPT-OSS-120B", "--prompts", "8192", "--chunk-tokens", "1024")
    case = "gpt-oss-120b, 8,192 tokens, window of 128, 18 layers"
    assert found[case, "arena and transfer"] == (8 * 16 * 36_864, 8192 * 36_864)
    assert found[case, "arena peak"] == (72 * 16 * 36_864, 8192 * 36_864)
    assert found[case, "pool"] == (8192 * 36_864,) * 2
    assert found[case, "decode step"] == (128 * 36_864, 8192 * 36_864)
    whole = found["gpt-oss-120b, 8,192 tokens, all", "decode step"]
    assert whole == ((8192 + 128) * 36_864, 8192 * 73_728)
    bare = figures(tmp_path, "gpt-oss-120b", "--prompts", "8192", "--no-pool-windows")
    assert bare[case, "pool"][0] == 0


def test_states_by_hand(tmp_path, capsys):
    found = figures(tmp_path, "Qwen3-Next-80B", "--prompts", "2048,10000", "--state-every", "256")
    case, state = "Qwen3-Next-80B, 10,000 tokens, state, 36 layers", 77_266_944
    assert found[case, "arena and transfer"] == (state, 10_000 * 36 * 2048)
    assert found[case, "arena peak"][0] == found[case, "decode step"][0] == 2 * state
    assert found[case, "pool"][0] == 3 * state, "after 4,096 and 8,192 tokens, and at the end"
    assert found["Qwen3-Next-80B, 2,048 tokens, state, 36 layers", "pool"][0] == state
    assert "\n 2,048  full, 12 layers" in capsys.readouterr().out


def test_other_types(tmp_path):
    wide = figures(tmp_path, "Llama-3-8B", "--prompts", "100", "--kv-type", "float32")
    assert wide["Llama-3-8B, 100 tokens, all", "decode step"][0] == 100 * 2 * 131_072


def test_the_layer_that_drafts(tmp_path):
    for model, layers in (("DeepSeek-V3", 62), ("Kimi-K2", 61), ("Llama-3-8B", 32)):
        without, found = (figures(tmp_path, model, "--prompts", "100", *flags) for flags in ((), ("--mtp",)))
        row = 131_072 // 32 if layers == 32 else 1152
        assert found[f"{model}, 100 tokens, all", "arena and transfer"][0] == -(-100 // 16) * 16 * layers * row
        assert (found == without) == (layers != 62)


def test_an_unknown_model_is_named(capsys):
    assert kv_bytes.main(["Llama-9"]) == 2
    assert "'Llama-9' is neither" in capsys.readouterr().err


def test_a_directory_with_an_unknown_key_is_refused_by_its_name(tmp_path, capsys):
    config = dict(next(model.config for model in PUBLISHED if model.name == "Kimi-K2"))
    (tmp_path / "config.json").write_bytes(orjson.dumps(config))
    assert kv_bytes.main([str(tmp_path), "--prompts", "64"]) == 0
    assert f"{tmp_path.name} (" in capsys.readouterr().out
    (tmp_path / "config.json").write_bytes(orjson.dumps(config | {"index_topk": 2048}))
    assert kv_bytes.main([str(tmp_path)]) == 2
    assert "index_topk in config.json is not known" in " ".join(capsys.readouterr().err.split())
