"""The keys of config.json that only some families have; hf_config.py reads the others.

Files:
    deepseek     The keys of config.json that only DeepSeek-V2, DeepSeek-V3 (R1, Kimi-K2, Moonlight) have -> fields of
                 ModelConfig
    kimi_linear  The keys of config.json that only Kimi Linear has -> fields of ModelConfig
    qwen3_next   The keys of config.json that only Qwen3-Next has -> fields of ModelConfig
"""
