"""GET /cluster for who has the cluster key: no API key on the way, an answer that only the asker can open."""

from __future__ import annotations

import os

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from net.channel.cluster_key import ClusterKey
from net.channel.keyring import Key, Keyring
from net.http.client import ClusterError, fetch_cluster
from net.http.common.joining import IV_BYTES, NONCE_BYTES, NotOurs, Question, asked
from net.http.common.keys import ApiKeys
from tests.net.fake_frontend import FakeFrontend, serving

OLD, NEW, STRANGE = (Key(bytes([number]) * 32) for number in (1, 2, 3))
NONCE, IV = bytes(NONCE_BYTES), bytes(IV_BYTES)


@pytest.fixture
def key_file(tmp_path):
    """key_file(OLD, NEW) -> the ClusterKey of a file with these."""

    def write(*keys: Key) -> ClusterKey:
        path = tmp_path / f"cluster.key-{os.urandom(4).hex()}"
        path.touch(0o600)
        path.write_text("\n".join(key.secret.hex() for key in keys))
        return ClusterKey(path)

    return write


async def test_the_key_is_proved_and_the_answer_sealed(key_file):
    ours = key_file(OLD)
    keys = {"api_key": "secret", "cluster_key": ours}
    async with serving(FakeFrontend(), **keys) as url, aiohttp.ClientSession(url) as session:
        assert await fetch_cluster(url[7:], None, cluster_key=key_file(NEW, OLD)) == {"members": []}, "rotated half-way"
        question = Question(OLD, os.urandom(NONCE_BYTES))
        async with session.get("/cluster", headers={"Authorization": question.header()}) as response:
            body = await response.read()
        assert b"members" not in body and question.open(body) == b'{"members":[]}'
        for path in ("/live", "/v1/models", "/debug/state"):  # good for /cluster only
            async with session.get(path, headers={"Authorization": question.header()}) as response:
                assert response.status == 401
        with pytest.raises(ClusterError, match="same --cluster-key-file"):
            await fetch_cluster(url[7:], "secret", cluster_key=key_file(STRANGE))


async def test_a_node_without_the_key_is_no_answer(key_file):
    for keys in (ApiKeys(None), ApiKeys("secret")):
        async with serving(FakeFrontend(), keys=keys) as url:
            with pytest.raises(ClusterError, match="no cluster key or a different one"):
                await fetch_cluster(url[7:], "secret", cluster_key=key_file(OLD))


def test_answers_fit_one_question():
    mine, other = Question(OLD, NONCE), Question(OLD, bytes([7]) * NONCE_BYTES)
    sealed = mine.seal(b"{}", IV)
    assert mine.open(sealed) == b"{}"
    for wrong in (other, Question(NEW, NONCE)):
        with pytest.raises(NotOurs):
            wrong.open(sealed)
    for damaged in (b"", sealed[:IV_BYTES], sealed[:-1], sealed[:-1] + bytes([sealed[-1] ^ 1])):
        with pytest.raises(NotOurs):
            mine.open(damaged)


def test_only_the_proof_of_our_keys_is_a_question():
    header = Question(OLD, NONCE).header()
    assert asked(Keyring((NEW, OLD)), header) == Question(OLD, NONCE)
    assert asked(Keyring((NEW,)), header) is None and asked(None, header) is None
    assert asked(Keyring((OLD,)), header[:-1] + ("0" if header[-1] != "0" else "1")) is None


@given(st.text(max_size=200))
def test_no_header_does_harm(text):
    assert asked(Keyring((OLD,)), text) is None
    assert asked(Keyring((OLD,)), f"Mooncake {text}") is None
