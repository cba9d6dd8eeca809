"""The Messages API, as Anthropic's clients speak it.

Files:
    routes  POST /v1/messages and /v1/messages/count_tokens: the answer of a chat, whole and as events
    schema  Bodies of POST /v1/messages and /v1/messages/count_tokens, and their conversion to the body of a chat
"""
