"""scripts/bench.py requests: it measures every route that reads a body, with requests that the API accepts."""

from __future__ import annotations

import pytest

from lab.bench.requests import REQUESTS, named_status
from net.http import create_app
from net.http.anthropic.schema import CountBody, MessagesBody
from net.http.openai.responses_schema import ResponsesBody
from net.http.openai.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from tests.net.fake_frontend import FakeFrontend

READS_NO_BODY = {"/v1/embeddings", "/ping", "/reset_prefix_cache", "/v1/batches/{batch_id}/cancel", "/v1/files"}
KINDS = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/responses": ResponsesBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}


def test_every_route_that_reads_a_body_is_measured():
    routes = create_app(FakeFrontend()).router.routes()
    posts = {route.resource.canonical for route in routes if route.method == "POST" and route.resource is not None}
    assert {path for path, _ in REQUESTS.values()} == posts - READS_NO_BODY


@pytest.mark.parametrize("name", [name for name in REQUESTS if named_status(name) == 200])
def test_a_request_without_a_status_in_its_name_has_a_valid_body(name):
    """The limits of the fields: a request that is refused at once would measure nothing."""
    path, body = REQUESTS[name]
    KINDS[path].model_validate(body)


def test_the_status_of_a_refusal_is_in_the_name():
    assert [named_status(name) for name in ("tokenize 4 MB (413)", "300 prompts (429)", "a tool (of 20)")] == [
        413, 429, 200,
    ]  # fmt: skip
