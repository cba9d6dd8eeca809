"""A KV connector for vLLM that loads and saves blocks of its KV cache in our pool.

vLLM makes one half of it in its scheduler and one in each worker.

Files:
    connector   PoolConnector: vLLM's KVConnectorBase_V1 on our pool; the only module that needs vLLM
    counts      The connector's counters: their names, what they mean, and how they are added and shown
    identity    The root of the keys of an engine's blocks: everything that makes KV bytes interchangeable between two
                processes
    layout      Where the KV of a block lies in the memory of the engine, and in the pool
    loading     Blocks from the pool straight into the memory of the engine, layer by layer during a step, or between
                steps
    options     The options of the connector: vLLM's kv_role and kv_connector_extra_config
    planner     Decides which blocks of which request are looked up, awaited, loaded and saved
    pool        The pool as one process of the engine uses it: an event loop in a thread, and an entry to the store
    saving      Complete blocks from the memory of the engine to the pool
    scheduling  The connector's half in the scheduler of the engine, without the engine's types: the planner, a clock
                and lookups
    work        The messages from the scheduler's half of the connector to the worker's half: what one step loads and
                saves
    worker      The connector's half in a worker of the engine, without the engine's types
"""
