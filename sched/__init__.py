"""Who does what: pure decisions, no clock, no sockets, no torch.

Files:
    admission    Decides when a node refuses requests and computes Retry-After: queue limits and objectives
    batching     Batching policies: how many prefill tokens a step may have in addition to its decodes
    beyond       Plans requests whose KV exceeds the arena of their node: which blocks lie where, tokens/s, and why it
                 refuses
    chunks       The chunks of a long prompt on a pipeline of nodes, each of which computes some of the layers
    classes      Service classes: the objectives of each, and its share when they compete
    cost         Predicts the time of prefills, decode steps and transfers with small regressions, fitted online to
                 measurements
    elsewhere    Divides the cold blocks of a request beyond memory: moved into DRAM, streamed from SSD, or asked
                 elsewhere
    idle_checks  When an idle node measures its steps again, and whether its cost models are wrong
    migration    Decides which running request moves to which decode node
    offload      Plans a model whose weights exceed the memory that they may use: which layers stay, and what a pass
                 costs
    part_turns   Turns of a node that computes a part of a long prompt, or prompts of class batch, and others as well
    queueing     Orders of the prompt queue: which prompt is prefilled next
    rejection    Decides which requests are refused under load: the variants of the paper
    role_change  Decides when a node that can prefill and decode, and does one of them, switches to the other
    role_ratio   A rival rule for role changes, and both by name: the ratio of prefill to decode nodes follows past
                 load
    step_cost    Predicts the time of a step with both decodes and prefill
    stretch      How far a node that cannot keep all objectives misses them: by the same factor for prompts and for
                 streams
    stripes      The chunks of a long prompt on nodes that each compute some of its tokens: context parallelism
    waiting      The wait for one of several equal servers, in the order of arrival: M/G/k by Allen-Cunneen, with an
                 exponential tail
    gossip/      The load and the blocks that nodes report to each other
    membership/  Who is in the cluster: SWIM with Lifeguard
    placement/   Where a request is prefilled and decoded: Algorithm 1 of the Mooncake paper and its rivals, one class
                 each
    scaling/     How many nodes of each role the load needs, how many ranks a node, and which of them start or leave
    sessions/    Sessions: when the next turn of a conversation comes, and what happens to its KV until then
"""
