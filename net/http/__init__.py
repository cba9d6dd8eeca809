"""The OpenAI API of a node. Knows nothing of models: everything goes through the `Frontend` protocol.

Files:
    client   What a joining node asks over HTTP before it has anything else: GET /cluster
    drain    POST /drain and GET /drain: a node leaves without dropping a request
    info     Every route that generates nothing: models, tokens, health, metrics, and what the node knows
    openapi  GET /openapi.json: the routes of the app as an OpenAPI 3.1 document
    server   The HTTP server of a node: routes, limits, start and stop
    common/  What every route of the HTTP API shares: errors, limits, bodies, connections
    openai/  The OpenAI API: bodies, rules, answers, streams
"""

from net.http.common.frontend import Frontend, LogprobItem, Output, Overloaded, Unavailable
from net.http.server import HttpServer, create_app

__all__ = ["Frontend", "HttpServer", "LogprobItem", "Output", "Overloaded", "Unavailable", "create_app"]
