"""A client that asks the same question again and again while a test breaks something, and keeps what went wrong."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread
from typing import Self

from lab.launch import rest
from tests.e2e.conftest import complete

PROMPT = [5, 6, 7, 8, 9]
TOKENS = 8


def answer(url: str) -> str:
    return complete(url, PROMPT, TOKENS)["choices"][0]["text"]


class SteadyClient:
    """Asks `url` in a thread, which calls `prepare` first; as a context manager. `answers` are all that came, `errors`
    the reasons of the rest."""

    def __init__(self, url: str, prepare: Callable[[], None] = lambda: None) -> None:
        self.answers: list[str] = []
        self.errors: list[str] = []
        self._url, self._prepare = url, prepare
        self._end = Event()
        self._thread = Thread(target=self._ask, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join(120)

    def _ask(self) -> None:
        self._prepare()
        while not self._end.wait(0.2):
            try:
                self.answers.append(answer(self._url))
            except rest.RestError as error:
                self.errors.append(str(error))
