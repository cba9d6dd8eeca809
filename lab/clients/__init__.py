"""The runs of scripts/tools.py stock-clients: what each stock client is asked to do.

Files:
    command        Run unmodified stock clients against a cluster of three nodes, and say which of them worked
    openai_checks  What an application does with the openai package
    runs           The command lines of stock clients, and how to tell from their own results that they worked
"""
