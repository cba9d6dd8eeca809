"""setup's arguments in all their forms, and MooncakeConfig."""

import json

import pytest

from connect.store.settings import MooncakeConfig, Setup, size_of


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("80GB", 80 << 30), ("4gb", 4 << 30), ("16 mb", 16 << 20), (5, 5), ("512", 512), ("1.5k", 1536)],
)
def test_sizes(text, nbytes):
    assert size_of(text) == nbytes


def test_lmcaches_spelling_and_upstreams_mean_the_same():
    lmcache = {"local_hostname": "a", "master_server_address": "h:1", "global_segment_size": "3355443200", "x": "y"}
    upstream = {"local_hostname": "a", "master_server_addr": "h:1", "global_segment_size": 3355443200}
    assert Setup.of(lmcache) == Setup.of(upstream) == Setup("a", "h:1", 3355443200, "default")


def test_the_configuration_comes_from_a_file_or_from_the_environment(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    given = {"local_hostname": "a", "metadata_server": "P2PHANDSHAKE", "master_server_address": "h:1"}
    path.write_text(json.dumps(given | {"global_segment_size": "1gb", "protocol": "TCP", "enable_ssd_offload": "yes"}))
    monkeypatch.delenv("MOONCAKE_MASTER", raising=False)
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(path))
    config = MooncakeConfig.load_from_env()
    assert (config.global_segment_size, config.protocol, config.enable_ssd_offload) == (1 << 30, "tcp", True)
    monkeypatch.delenv("MOONCAKE_CONFIG_PATH")
    with pytest.raises(ValueError, match="MOONCAKE_MASTER"):
        MooncakeConfig.load_from_env()
    monkeypatch.setenv("MOONCAKE_MASTER", "h:2")
    monkeypatch.setenv("MOONCAKE_LOCAL_BUFFER_SIZE", "2gb")
    config = MooncakeConfig.load_from_env()
    assert (config.master_server_address, config.local_buffer_size) == ("h:2", 2 << 30)
    assert (config.global_segment_size, config.metadata_server) == (3355443200, "P2PHANDSHAKE")


@pytest.mark.parametrize("wrong", [{"protocol": " "}, {"local_hostname": ""}, {"local_buffer_size": -1}])
def test_wrong_settings_are_named(wrong):
    good = dict(local_hostname="a", metadata_server="b", global_segment_size=0, local_buffer_size=0)  # noqa: C408
    with pytest.raises(ValueError, match=next(iter(wrong))):
        MooncakeConfig(**(good | {"protocol": "tcp", "device_name": "", "master_server_address": "c"} | wrong))
    path_free = {"local_hostname": "a"}
    assert Setup.of(path_free).master_server_addr == ""


def test_a_file_without_a_needed_field(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"local_hostname": "a"}')
    with pytest.raises(ValueError, match="metadata_server"):
        MooncakeConfig.from_file(str(path))
