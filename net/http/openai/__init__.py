"""The OpenAI API: bodies, rules, answers, streams.

Files:
    fields      Fields of request bodies: what happens to those we do not serve
    logprobs    Log probabilities as /v1/completions shows them: four lists over the tokens of a choice
    plan        From a valid body to what the frontend is asked: token ids, sampling fields
    render      Outputs as OpenAI JSON: choices of completions and chats, whole and in pieces
    routes      The two completion routes, streamed and whole
    rules       What the OpenAPI document says of bodies beyond the types of single fields
    schema      Request bodies: the fields we serve, and their types
    streams     Running the choices of one request at the same time: several generations in, one stream of
    structured  What a client says its answer must be: OpenAI's response_format
    tools       Tools of a chat: what a client offers, and the calls in what the model wrote
"""
