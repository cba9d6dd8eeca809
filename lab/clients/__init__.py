"""The runs of scripts/tools.py stock-clients: the tests of each stock client.

Files:
    agents         Command lines of agents: they send long instructions and many tools, in several turns
    command        Run unmodified stock clients against a cluster of three nodes, and report which of them worked
    openai_checks  Typical calls of an application with the openai package, run by the interpreter of a virtual
                   environment that has it
    runs           The command lines of stock clients, and how their own results show success
    libraries/     Checks of client libraries, each run by the interpreter of the library's own virtual environment
"""
