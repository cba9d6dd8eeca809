"""/v1/files and /v1/batches: thousands of prompts in a file, answered in idle capacity, kept on disk (--batch-path).

Files:
    answering  One line of a batch: its body through the same plan and renderer as a request over HTTP
    files      Files of clients and of batches on disk
    journal    The answers of one batch on disk, a line each, in the order in which they ended
    line       One line of an input file, and the lines of output and error files
    pace       How many lines of batches run at once: as many as find room, and few that wait for a first token
    record     The state of one batch, as the API shows it
    routes     The routes of files and batches
    runner     Runs batches: validates, answers line by line, writes the output and the error file
    schema     The bodies of /v1/batches
"""
