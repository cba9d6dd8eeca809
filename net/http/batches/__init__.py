"""/v1/files and /v1/batches: thousands of prompts in a file, answered in idle capacity, kept on disk (--batch-path).

Files:
    answering  One line of a batch: its body through the same plan and renderer as a request over HTTP
    files      Files of clients and of batches on disk: `ID` has the bytes, `ID.json` what the API shows
    folder     Batches on disk: `ID.json` has the record of one, `ID.input` links to its input file, `ID.lines` is its
               journal
    journal    The answers of one batch on disk, a line each, in the order in which they ended
    line       One line of an input file, and the lines of output and error files, in OpenAI's form
    pace       How many lines of batches run at once
    places     Where each line of an input file is
    record     The state of one batch, as the API shows it
    routes     The routes of files and batches, in OpenAI's form
    runner     Runs batches: validates, answers line by line, writes the output and the error file
    schema     The bodies of /v1/batches, and the numbers in queries and forms
    upload     Receives an uploaded file: the parts of its multipart body
"""
