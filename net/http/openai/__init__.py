"""The OpenAI API: bodies, rules, answers, streams.

Files:
    fields      Fields of request bodies: the treatment of fields that are not served
    logprobs    Log probabilities in the format of /v1/completions: four lists over the tokens of a choice
    messages    Chat messages in requests: their content as text, and the calls of earlier answers
    plan        Converts a valid body to requests for the frontend: token ids, sampling fields
    render      Renders outputs as OpenAI JSON: choices of completions and chats, whole and in chunks
    routes      The two completion routes, streamed and whole
    rules       Rules of bodies in the OpenAPI document beyond the types of single fields
    schema      Request bodies: the served fields and their types
    streams     Runs the choices of one request concurrently: merges several generations into one stream of
    structured  Structured output in requests: OpenAI's response_format
    tools       Tools of a chat: the client's definitions, and the calls in the model's text
"""
