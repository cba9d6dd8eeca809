"""The OpenAI API: bodies, rules, answers, streams.

Files:
    blocks            An answer as a list of blocks, texts and calls of tools
    fields            Fields of request bodies: the treatment of fields that are not served
    logprobs          Log probabilities in the format of /v1/completions: four lists over the tokens of a choice
    messages          Chat messages in requests: their content as text, and the calls of earlier answers
    plan              Converts a valid body to requests for the frontend: token ids, sampling fields
    prompts           Prompts as token ids, within the limits of the model and of one request: texts, ids
    render            Renders outputs as OpenAI JSON: choices of completions and chats, whole and in chunks
    responses         POST /v1/responses: the answer of a chat in the format of OpenAI's newer API
    responses_schema  Body of POST /v1/responses, and its conversion to the body of a chat
    routes            The two completion routes, streamed and whole
    rules             Rules of bodies in the OpenAPI document beyond the types of single fields
    schema            Request bodies: the served fields and their types
    serving           One request of any generating route, from its body to its answer: room, turn, plan
    sse               Sends a stream of server-sent events: what every streamed answer of the API shares
    streams           Runs the choices of one request concurrently: merges several generations into one stream of
    structured        Structured output in requests: OpenAI's response_format
    tools             Tools of a chat: the client's definitions, and the calls in the model's text
    unique_items      `uniqueItems` in JSON schemas: no grammar can enforce it
    usage             Token counts of one HTTP request
"""
