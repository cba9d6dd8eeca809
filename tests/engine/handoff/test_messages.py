"""A request on the wire: what the engine nodes need to know of it arrives."""

from __future__ import annotations

import orjson
import pytest

from cache.block import BlockGeometry
from cache.keys import root_key
from engine.handoff.messages import WireRequest, pack_request, unpack_request
from engine.sampling.params import SamplingParams
from engine.step.request import Request
from net.bodies import decode, encode
from sched.classes import CLASSES

ROOT = root_key("toy", BlockGeometry(1, 1, 2, 4, "float32"))


@pytest.mark.parametrize("name", CLASSES)
def test_class_and_age_travel_with_the_request(name):
    """Clocks of nodes differ: the age travels, so that both nodes agree on who came first."""
    sent = Request("r", [1, 2, 3], 2, SamplingParams(max_tokens=4, stop=("x",)), 1000.0, ROOT, name)
    wire, data = pack_request(sent, age_s=12.5)
    arrived = decode(WireRequest, orjson.loads(orjson.dumps(encode(wire))))
    got = unpack_request(arrived, memoryview(b"".join(data)), now=50.0)
    assert (got.service_class, got.arrival) == (name, 37.5)
    assert (got.token_ids, got.sampling, got.root, got.first_output_index) == ([1, 2, 3], sent.sampling, ROOT, 1)
