"""One frozen Config: its fields, its flags, and the resolution of auto.

Files:
    agreement        The facts that nodes must have in common before they share KV
    backend_address  --backend: where a worker answers, and where it tells its KV events
    beyond           Whether and how far a node takes requests whose KV exceeds its arena, and whether it lends room
                     to them
    cache            The part of Config for the cache: where KV is stored, in which format, and for how long
    cache_policies   The eviction and admission policies that the flags name, for the engine's KV arena and the
                     store's share
    config           One frozen Config for a node; its flags are generated from its fields in engine/config/flags.py
    contradictions   Flags that contradict each other on every machine and with every model, and the message for each
    field            A field of Config that is also a command-line flag: its default, and its data for --help and the
                     parser
    fits             Whether the memory and the disk that the flags name exist on this machine
    flag_values      One field of Config as text: its flag's name, and how its value is parsed and formatted
    flags            The command line of a node, generated from the fields of Config: parse it, show it
    forms            The form of this node's KV blocks and that of the cluster's: what the pool keeps and block keys
                     cover
    machine          The facts about this machine from which `engine.config.resolve` resolves every 'auto'
    model            The first half of Config: the node, its model, and the computation of steps
    net_options      Converts a Config to the options of net/: transports, the cluster key, the API keys
    resolve          Resolves 'auto': one function turns the user's flags and the machine's facts into the final
                     Config
    scaling          The part of Config for the number of nodes: price and site of this one, and those that start and
                     leave
    shape            The shape of KV blocks, from flags and a model's configuration
    step_policies    The policies of steps and admission that the flags name: built-in ones, or a user's file
    tenants          The value of --tenants: tenants of the store, and their quotas
"""
