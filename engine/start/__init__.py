"""From the flags to a serving node: what is imported when, and the life of the process.

Files:
    garbage       When a node collects garbage: cycles of objects that nobody uses any more
    serve         Runs a node with the configuration from the command line until it is told to stop
    torch_import  Imports torch in threads, next to the import of a node's other modules and to what a start waits for
"""
