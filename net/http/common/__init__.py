"""The common parts of all routes of the HTTP API: errors, limits, bodies, connections.

Files:
    accepting    Accepts the connections of a burst together
    answers      JSON Schemas of the answers in the OpenAPI document
    body         Reads a JSON body: checks size, type, UTF-8, JSON and fields; each failure has its own status and
                 message
    bounds       How many values a JSON text may have, and how deep they may be nested
    connections  The connections of the HTTP server: read deadlines, a limit on their number, and answers to other
                 protocols
    door         Refuses requests on their connection, before the HTTP server reads them, while there is no room for
                 more
    errors       Errors in OpenAI's format: a status and {"error": {message, type, param, code}}
    frontend     The interface of the HTTP layer to its node
    heads        Reads the id and the API key of a request from its headers
    joining      GET /cluster between nodes with a cluster key: the question proves the key, and the answer is sealed
                 with it
    keys         API keys: --api-key and the current lines of --api-key-file
    limits       Protects clients from each other: requests per second, connections, web origins, and private routes
    middleware   Applied to every request: an id, the key check, and the conversion of exceptions to OpenAI errors
    page         The live page at `/`: static files of assets/, without a build step or external files
    pieces       Sends large JSON answers without blocking the event loop or the interpreter lock for long
    unknown      --unknown-fields: ignores or refuses the fields of a body that this server does not know
"""
