"""Finds what drafts for the served model: another model with its vocabulary, its own further layer, or a head."""

from __future__ import annotations

from dataclasses import replace

from engine.checkpoint.eagle_head import with_head
from engine.checkpoint.model_source import ModelSource, describe
from engine.config.config import Config
from engine.config.flags import UsageError
from engine.text.tokenizer import Tokenizer


def draft_source(config: Config) -> ModelSource | None:
    """The model that --speculative-model names, on nodes that decode; its format may differ from the served model's.
    Raises ModelError."""
    if config.speculative_model is None or config.speculative_method != "draft" or "decode" not in config.roles:
        return None
    return describe(config.speculative_model, "dummy" if config.load_format == "dummy" else "auto", config.seed)


def with_draft_layer(config: Config, source: ModelSource) -> ModelSource:
    """`source`; for --speculative-method mtp or eagle with the layer that drafts, whose KV is then a part of every
    block. Raises UsageError if the model has none, ModelError if the head does not fit it."""
    if source.format == "none":
        return source
    if config.speculative_method == "eagle" and config.speculative_model is not None:
        return with_head(source, config.speculative_model)
    if config.speculative_method != "mtp":
        return source
    if not source.config.num_draft_layers:
        raise UsageError(
            f"--speculative-method mtp: the configuration of {source.name} has no num_nextn_predict_layers, so the "
            "model has no layer that drafts; choose another method"
        )
    return replace(source, config=replace(source.config, draft_layers=1))


def check_draft(draft: ModelSource | None, served: ModelSource, tokenizer: Tokenizer) -> None:
    """The draft model's tokens must mean the same as the served model's. Raises UsageError, ModelError."""
    if draft is None:
        return
    ours, theirs = served.config.vocab_size, draft.config.vocab_size
    reason = f"{theirs} logits, not {ours}" if ours != theirs else tokenizer.disagreement(Tokenizer.load(draft))
    if reason:
        raise UsageError(
            f"--speculative-model {draft.name} does not fit {served.name}: its vocabulary has {reason}; "
            "take a smaller model of the same family"
        )
