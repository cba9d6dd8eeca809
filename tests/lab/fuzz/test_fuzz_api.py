"""scripts/tools.py fuzz-api: what it takes for a fault, and that it sees the faults of a server that has some."""

from __future__ import annotations

import json

import pytest

from lab.fuzz.answers import Judge, fault
from lab.fuzz.promises import Promises

ERROR = json.dumps({"error": {"message": "no", "type": "t", "param": None, "code": None}})
PATHS = ("/v1/models/{model}", "/v1/models", "/")


def answer(status: int, text: str = ERROR, **headers: str) -> dict:
    named = [{"name": name.replace("_", "-"), "value": value} for name, value in headers.items()]
    return {"status": status, "headers": named, "content": {"text": text}}


@pytest.mark.parametrize(
    ("response", "wrong"),
    [
        (answer(200, "anything"), None),
        (answer(400), None),
        (answer(429, Retry_After="1"), None),
        (answer(503, Retry_After="1"), None),
        (answer(503), "503 without Retry-After"),
        (answer(500, Retry_After="1"), "server error 500"),
        (answer(404, "Not Found"), "404 without an error body"),
        (answer(404, '{"error": "no"}'), "404 without an error body"),
        (answer(0), "no answer"),
    ],
)
def test_what_a_fault_is(response, wrong):
    assert fault("GET", response) == wrong


def test_head_has_no_body():
    assert fault("HEAD", answer(404, "")) is None


def test_answers_are_counted_by_operation_and_faults_name_the_request():
    def entry(method: str, path: str, response: dict | None) -> dict:
        return {"request": {"method": method, "url": f"http://h:1{path}", "postData": {"text": "{}"}}} | (
            {} if response is None else {"response": response}
        )

    judge = Judge(PATHS, Promises({"paths": {}, "components": {}}))
    judge.take([entry("GET", "/v1/models", answer(200)), entry("GET", "/v1/models/x%2Fy?a=1", answer(404))])
    judge.take([entry("POST", "/v1/models", answer(500)), entry("GET", "/a/b", answer(404))])
    judge.take([entry("GET", "/", None)])
    assert judge.operations == [
        "GET (no such path)",
        "GET /",
        "GET /v1/models",
        "GET /v1/models/{model}",
        "POST /v1/models",
    ]
    assert judge.statuses("GET /v1/models/{model}") == {404: 1}
    assert judge.faults == ["server error 500: POST http://h:1/v1/models {}", "no answer: GET http://h:1/ {}"]
    assert judge.seen.total() == 5


def test_an_answer_to_head_says_nothing_about_the_document():
    judge = Judge(PATHS, Promises({"paths": {}, "components": {}}))
    head = {"method": "HEAD", "url": "http://h:1/"}
    judge.take([{"request": head, "response": {"status": 404, "headers": [], "content": {}}}])
    assert judge.faults == [] and judge.statuses("HEAD /") == {404: 1}


def test_no_request_is_a_fault():
    judge = Judge(PATHS, Promises({"paths": {}, "components": {}}))
    judge.take([])
    assert judge.faults == ["the archive has no request, so nothing is known"]


def test_bodies_that_the_document_allows_must_be_served_unless_it_cannot_say_why_not():
    schema = {"$ref": "#/components/schemas/Body"}
    body = {"required": ["n"], "properties": {"n": {"type": "integer"}}, "type": "object"}
    operation = {"requestBody": {"content": {"application/json": {"schema": schema}}}}
    document = {"paths": {"/": {"post": operation, "get": {}}}, "components": {"schemas": {"Body": body}}}
    promises = Promises(document, unsaid=["too long"])
    assert promises.allows("POST /", '{"n": 1.0}') and not promises.allows("POST /", '{"n": 1.5}')
    assert not promises.allows("POST /", "{") and not promises.allows("POST /", '{"n": NaN}')
    assert not promises.allows("GET /", '{"n": 1}')

    def entry(text: str, message: str, status: int = 400) -> dict:
        said = answer(status, json.dumps({"error": {"message": message, "type": "", "param": None, "code": None}}))
        return {"request": {"method": "POST", "url": "http://h:1/", "postData": {"text": text}}, "response": said}

    judge = Judge(document["paths"], promises)
    judge.take([entry('{"n": 2}', "n is too long"), entry("{}", "no n"), entry('{"n": 2}', "moved", 404)])
    assert judge.faults == []
    judge.take([entry('{"n": 2}', "I do not like 2")])
    assert judge.faults == ["400 for a body that the document allows, 'I do not like 2': POST http://h:1/ {\"n\": 2}"]
