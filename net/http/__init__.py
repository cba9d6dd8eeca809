"""The OpenAI API of a node. Knows nothing of models: everything goes through the `Frontend` protocol.

Files:
    client        The first question of a joining node, over HTTP: GET /cluster
    docs          GET /docs: the routes of /openapi.json as a page to read, without scripts and files of others
    drain         POST /drain and GET /drain: a node leaves without dropping a request
    info          All routes that generate no text: models, tokens, health, metrics, and the node's state
    openapi       GET /openapi.json: the routes of the app as an OpenAPI 3.1 document
    prefix_cache  POST /reset_prefix_cache: all nodes of the cluster forget cached KV
    server        The HTTP server of a node: routes, limits, start and stop
    weights       POST and GET /v1/update_weights: the cluster serves other weights, which a program put into the pool
                  as tensors
    anthropic/    The Messages API, as Anthropic's clients speak it
    batches/      /v1/files and /v1/batches: thousands of prompts in a file, answered in idle capacity, kept on disk
    common/       The common parts of all routes of the HTTP API: errors, limits, bodies, connections
    openai/       The OpenAI API: bodies, rules, answers, streams
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from net.http.common.frontend import Frontend, LogprobItem, Output, Overloaded, Unavailable

if TYPE_CHECKING:
    from net.http.server import HttpServer, create_app

__all__ = ["Frontend", "HttpServer", "LogprobItem", "Output", "Overloaded", "Unavailable", "create_app"]


def __getattr__(name: str) -> Any:
    """The server is loaded at its first use: a client in the process of another engine never needs it."""
    if name not in ("HttpServer", "create_app"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from net.http import server

    return getattr(server, name)
