"""Commands that are neither a benchmark nor a fault: checks, converters, formulas.

Files:
    compare    Two checkouts on the same benchmarks, in turns: is the changed one as fast as the other one?
    export_hf  The embedded model, or another Llama in a GGUF file, as a Hugging Face directory that other engines
               load
    perfetto   Requests across nodes as a Chrome trace: open the file in https://ui.perfetto.dev or chrome://tracing
"""

from lab.planning import PLANS

OTHERS = {
    "cache-policies": "lab.caches.command",
    "compare": "lab.tools.compare",
    "cut-draft": "lab.drafts.command",
    "export-hf": "lab.tools.export_hf",
    "foreign-backends": "lab.foreign.backends.command",
    "foreign-contracts": "lab.foreign.contracts.command",
    "foreign-vllm": "lab.foreign.vllm.command",
    "fuzz": "lab.fuzz.decoders",
    "fuzz-api": "lab.fuzz.api",
    "gpu-check": "lab.gpu.command",
    "kv-events": "lab.foreign.events.command",
    "mutants": "lab.mutants.command",
    "perfetto": "lab.tools.perfetto",
    "rdma-vm": "lab.rdma_vm.command",
    "record-conformance": "lab.conformance.record",
    "screenshots": "lab.docs.screenshots",
    "stock-clients": "lab.clients.command",
    "vllm-pair": "lab.foreign.vllm.pair_proxy",
}
TOOLS = dict(sorted((PLANS | OTHERS).items()))
"""Name on the command line (scripts/tools.py) -> module whose main() runs it; those of scripts/plan.py among them."""
