"""KV events in vLLM's form: which blocks a node holds, told over ZeroMQ.

wire        The messages: MessagePack of vLLM's structs
settings    --kv-events-config: where a node publishes, in vLLM's JSON
backlog     The last batches, kept for subscribers that missed some
publisher   Publishes the batches of this node and sends missed ones again
arrival     The order of arriving batches: which one is next, missing, or of another process
subscriber  Follows the events of one publisher

Files:
    arrival     The order of arriving batches: which one is next, which are missing, which are of another process
    backlog     The last batches, kept for subscribers that missed some
    publisher   Publishes the batches of this node and sends missed ones again, over ZeroMQ as vLLM does
    settings    --kv-events-config: where a node publishes its KV events, in vLLM's JSON
    subscriber  Follows the events of one publisher, and reports every batch once, in order
    wire        The messages of KV events: MessagePack of the structs that vLLM 0.32 publishes
"""
