"""What every route of the HTTP API shares: errors, limits, bodies, connections.

Files:
    answers      What the OpenAPI document says of answers
    body         Reading a JSON body: size, type, UTF-8, JSON, fields
    connections  The connections of the HTTP server: who has to send what by when
    errors       Errors as OpenAI clients know them: a status and {"error": {message, type, param, code}}
    frontend     What the HTTP layer asks of the node behind it
    joining      GET /cluster between those who share a cluster key: the question proves the key
    keys         API keys: --api-key and the lines of --api-key-file, as the file is now
    limits       What keeps one client from harming the others: requests a second, connections
    middleware   What every request passes: an id, the key
    page         The live page at `/`: static files of assets/, no build step, nothing from elsewhere
    pieces       Large answers as JSON without holding the event loop or the interpreter lock for long
"""
