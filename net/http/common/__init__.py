"""What every route of the HTTP API shares: errors, limits, bodies, connections.

Files:
    answers      JSON Schemas of the answers in the OpenAPI document
    body         Reads a JSON body: checks size, type, UTF-8, JSON and fields
    connections  The connections of the HTTP server: read deadlines
    errors       Errors in OpenAI's format: a status and {"error": {message, type, param, code}}
    frontend     The interface of the HTTP layer to its node
    joining      GET /cluster between nodes with a cluster key: the question proves the key
    keys         API keys: --api-key and the current lines of --api-key-file
    limits       Protects clients from each other: requests per second, connections, allowed web origins
    middleware   Applied to every request: an id, the key check
    page         The live page at `/`: static files of assets/, without a build step or external files
    pieces       Sends large JSON answers without blocking the event loop or the interpreter lock for long
    unknown      --unknown-fields: a field of a body that this server does not know is ignored
"""
