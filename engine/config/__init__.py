"""One frozen Config: its fields, its flags, and what auto becomes.

Files:
    cache           The part of Config that says where KV is kept, in what form, and for how long
    cache_policies  The eviction and admission policies that the flags name
    config          One frozen Config for a node; its flags are generated from its fields in engine/config/flags.py
    contradictions  Flags that cannot work together, whatever the machine and the model: the message for each
    field           A field of Config that is also a command-line flag: its default
    flag_values     One field of Config as text: its flag's name, how a value is read, how it is spelled
    flags           The command line of a node, generated from the fields of Config: parse it, show it
    machine         What this machine offers: the facts that `engine.config.resolve` settles every 'auto' with
    model           The first half of Config: the node, the model it serves, and how a step of it is computed
    net_options     From a Config to what net/ is made with: transports, their options, the cluster key
    resolve         'auto' -> values: one function turns what the user said and what the machine offers into the final
                    Config
"""
