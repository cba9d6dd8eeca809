"""The KV and the weights of published models, as plans and the simulator see them.

Files:
    architecture  A model as plans and the simulator see it: the groups of its KV, and its weights
    channels      Kimi Linear: most layers keep a state, with a decay for each channel (arXiv 2510.26692), the others
                  a latent
    delta         Qwen3-Next: three layers of four keep a state (gated delta rule, arXiv 2412.06464), the fourth K and
                  V per head
    families      The common parts of families that the engine does not run: how they are described, and what several
                  of them have
    find          A model by its published name or from a Hugging Face directory
    latent        DeepSeek-V2, DeepSeek-V3 and Kimi-K2: one latent row per token for all heads
    published     Configurations of published models, a row each
    read_config   The groups and the weights of a model, from its config.json
    sinks         gpt-oss: every other layer sees a window; experts in MXFP4
"""
