from __future__ import annotations

import pytest

from net.kv_events.settings import EventSettings, parse


def test_vllms_json_is_understood():
    text = '{"enable_kv_cache_events": true, "publisher": "zmq", "topic": "kv@a", "endpoint": "tcp://*:1", "hwm": 5}'
    assert parse(text) == EventSettings("tcp://*:1", topic="kv@a", hwm=5)
    assert parse('{"enable_kv_cache_events": true}') == EventSettings()


@pytest.mark.parametrize(
    "text", ["{}", '{"enable_kv_cache_events": true, "publisher": "null"}', '{"publisher": "zmq"}']
)
def test_off(text):
    assert parse(text) is None


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("nonsense", "JSON"),
        ("[]", "object"),
        ('{"enable_kv_cache_events": 1}', "enable_kv_cache_events"),
        ('{"enable_kv_cache_events": true, "publisher": "nats"}', "publisher"),
        ('{"enable_kv_cache_events": true, "endpoint": 5557}', "endpoint"),
        ('{"enable_kv_cache_events": true, "replay_endpoint": "5558"}', "replay_endpoint"),
        ('{"enable_kv_cache_events": true, "buffer_steps": 0}', "buffer_steps"),
        ('{"enable_kv_cache_events": true, "topic": 1}', "topic"),
        ('{"enable": true}', "'enable'"),
    ],
)
def test_errors_name_the_field(text, names):
    with pytest.raises(ValueError, match=names):
        parse(text)
