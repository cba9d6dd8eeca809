"""The OpenAI API: bodies, rules, answers, streams.

Files:
    best_of           best_of: draws more choices than the answer has, and keeps those with the highest mean log
                      probability
    blocks            An answer as a list of blocks, texts and calls of tools: what /v1/responses and /v1/messages
                      have in common
    fields            Fields of request bodies: the treatment of fields that are not served, and types that several
                      bodies share
    logprobs          Log probabilities in the format of /v1/completions: four lists over the tokens of a choice
    messages          Chat messages in requests: their content as text, and the calls of earlier answers
    plan              Converts a valid body to requests for the frontend: token ids, sampling fields, one entry per
                      choice
    prompts           Prompts as token ids, within the limits of the model and of one request: texts, ids, rendered
                      conversations
    render            Renders outputs as OpenAI JSON: choices of completions and chats, whole and in chunks, logprobs
                      and usage
    responses         POST /v1/responses: the answer of a chat in the format of OpenAI's newer API, whole and as
                      events
    responses_schema  Body of POST /v1/responses, and its conversion to the body of a chat
    routes            The two completion routes, streamed and whole
    rules             Rules of bodies in the OpenAPI document beyond the types of single fields
    schema            Request bodies: the served fields and their types
    serving           One request of any generating route, from its body to its answer: room, turn, plan, stream or
                      whole
    sse               Sends a stream of server-sent events: what every streamed answer of the API shares
    streams           Runs the choices of one request concurrently: merges several generations into one stream of
    structured        Structured output in requests: OpenAI's response_format, vLLM's structured_outputs and its older
                      guided_*
    tools             Tools of a chat: the client's definitions, and the calls in the model's text
    unique_items      `uniqueItems` in JSON schemas: no grammar can enforce it, so it is a field that this server does
                      not know
    usage             Token counts of one HTTP request
"""
