"""Other engines run on our pool and our transfers, through the Python names that they call already.

Files:
    vllm_plugin     The plug-in that vLLM loads in each of its processes if our package is installed
    common/         The common parts of the modules for other engines: an event loop for callers that wait, and raw
                    memory
    engine/         Upstream's mooncake.engine on our transfers
    lmcache/        LMCache on our pool
    process_group/  torch.distributed over our collectives: the backends `mooncake` and `mooncake-cpu`
    sglang/         SGLang's hierarchical cache on our pool
    site/           The packages that a wheel puts at the top of site-packages
    store/          Upstream's mooncake.store on our pool
    vllm/           A KV connector for vLLM that loads and saves blocks of its KV cache in our pool
"""
