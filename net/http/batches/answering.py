"""One line of a batch: its body through the same plan and renderer as a request over HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import orjson

from net.http.batches.line import Line
from net.http.common.body import parsed
from net.http.common.errors import from_exception, naming
from net.http.common.frontend import Frontend, Overloaded, Unavailable
from net.http.common.pieces import encoded
from net.http.openai.best_of import generated
from net.http.openai.plan import plan_chat, plan_completion
from net.http.openai.render import ChatRenderer, CompletionRenderer
from net.http.openai.schema import ChatBody, CompletionBody

CLASS = "batch"


async def answer(
    frontend: Frontend, line: Line, endpoint: str, request_id: str, first_token: Callable[[], None]
) -> tuple[int, dict[str, Any]]:
    """(HTTP status, body). The answer to a refused body has a status of 4xx, to one that fails 500. Raises Overloaded
    and Unavailable: the line can run later. `first_token()` is called when it has one."""
    try:
        raw = await asyncio.to_thread(orjson.dumps, line.body)
        body: CompletionBody | ChatBody
        kind: type[CompletionRenderer | ChatRenderer]
        if endpoint == "/v1/completions":
            completion = await asyncio.to_thread(parsed, raw, CompletionBody, [])
            body, kind = completion.model_copy(update={"service_class": CLASS}), CompletionRenderer
            plan = await plan_completion(frontend, body, len(raw))
        else:
            chat = await asyncio.to_thread(parsed, raw, ChatBody, [])
            body, kind = chat.model_copy(update={"service_class": CLASS}), ChatRenderer
            plan = await plan_chat(frontend, body, len(raw))
        told = kind(frontend, plan, request_id, int(time.time()), body.return_token_ids, body.stream_options)
        begun = False
        async with aclosing(generated(frontend, plan, request_id)) as items:
            async for choice, output in items:
                if not begun:
                    begun = True
                    first_token()
                told.collect(choice, output)
        return 200, orjson.loads(b"".join(await encoded(told.size, told.whole)))
    except (Overloaded, Unavailable):
        raise
    except ValueError as error:
        refused = naming(str(error))
    except Exception as error:
        refused = from_exception(error, request_id)
    return refused.status, refused.body()
