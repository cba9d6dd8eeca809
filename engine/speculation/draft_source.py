"""Finds the draft model for the served model, and checks that their vocabularies match."""

from __future__ import annotations

from engine.checkpoint.model_source import ModelSource, describe
from engine.config.config import Config
from engine.config.flags import UsageError
from engine.text.tokenizer import Tokenizer


def draft_source(config: Config) -> ModelSource | None:
    """The model that --speculative-model names, on nodes that decode; its format may differ from the served model's.
    Raises ModelError."""
    if config.speculative_model is None or "decode" not in config.roles:
        return None
    return describe(config.speculative_model, "dummy" if config.load_format == "dummy" else "auto", config.seed)


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
