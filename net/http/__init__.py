"""The OpenAI API of a node. Knows nothing of models: everything goes through the `Frontend` protocol."""

from net.http.frontend import Frontend, LogprobItem, Output, Overloaded, Unavailable
from net.http.server import HttpServer, create_app

__all__ = ["Frontend", "HttpServer", "LogprobItem", "Output", "Overloaded", "Unavailable", "create_app"]
