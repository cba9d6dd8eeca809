"""Checks of client libraries, each run by the interpreter of the library's own virtual environment.

Files:
    agents_checks       /v1/responses with the openai package, and openai-agents over both of its kinds of models
    anthropic_checks    anthropic's package on /v1/messages: messages, streams, tools, counts, errors
    common              The common parts of the checks of all libraries: the server, and a question with one certain
                        answer
    instructor_checks   instructor in its modes: constrained ones must fit, free ones must not fail a call
    langchain_checks    langchain-openai: chats, streams, batches, structured output, tools
    litellm_checks      litellm by three routes: openai, hosted_vllm and anthropic
    llm_checks          The command `llm`: answers, a continued conversation, a schema
    outlines_checks     outlines: models, choices and expressions as output types
    pydantic_ai_checks  pydantic-ai over chats, responses and messages: text, output types, streams
    run                 Runs the checks of one client library with the interpreter of a virtual environment that has
                        it
"""
