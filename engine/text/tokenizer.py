"""Tokenizer: text <-> token ids, chat messages -> token ids, and tokens -> text as they arrive.

It is loaded from tokenizer.json and related files in a Hugging Face directory, or from GGUF metadata. Does not import
torch.
"""

from __future__ import annotations

import codecs
import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from engine.checkpoint.gguf.file import GGUFFile
from engine.checkpoint.model_source import ModelSource, embedded_model, read_json
from engine.config.config import EMBEDDED_MODEL
from engine.model.model_error import ModelError
from engine.text import gguf_tokenizer
from engine.text.chat_template import ChatTemplate, checked
from engine.text.control_tokens import ControlTokens
from engine.text.token_bytes import TokenBytes

DECODE_CHUNK_TOKENS = 4096
"""Token ids per call of the Rust library's decoder."""

KEPT_TEMPLATES = 16
"""Compiled templates of clients. To compile one takes a few milliseconds."""


class Tokenizer:
    """Immutable after construction; safe to call from several threads."""

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        """`special_tokens`: texts of bos_token, eos_token, ...; `eos_token_ids`: tokens that end a generation, in
        addition to the tokenizer's own eos_token."""
        core.no_truncation()
        core.no_padding()
        self._core = core
        special = dict(special_tokens or {})
        self.info = {"tokenizer_class": "PreTrainedTokenizerFast", **special, "chat_template": chat_template}
        try:
            self._template = ChatTemplate(chat_template, special) if chat_template else None
        except ValueError as error:
            raise ModelError(f"{error}; check the model's files") from None
        self._of_client = functools.lru_cache(KEPT_TEMPLATES)(lambda template: ChatTemplate(template, special))
        own_eos = core.token_to_id(special["eos_token"]) if "eos_token" in special else None
        self.eos_token_ids = tuple(dict.fromkeys([*eos_token_ids, *([] if own_eos is None else [own_eos])]))
        self.bytes_of = TokenBytes(core)
        added = core.get_added_tokens_decoder().values()
        self._controls = ControlTokens(token.content for token in added if token.special)

    @classmethod
    def load(cls, source: ModelSource, tokenizer: str = "auto") -> Tokenizer:
        """The model's own tokenizer, or the one in `tokenizer`: a directory, a tokenizer.json, a .gguf file, or the
        embedded model's name. Raises ModelError."""
        path = _locate(source, tokenizer)
        parts = _from_gguf(path) if path.suffix == ".gguf" else _from_directory(path)
        loaded = cls(*parts, source.config.eos_token_ids)
        if (largest := max(loaded._core.get_vocab().values(), default=-1)) >= source.config.vocab_size:
            raise ModelError(
                f"the tokenizer in {path} has token ids up to {largest}, but {source.name} has a vocabulary of "
                f"{source.config.vocab_size}: it belongs to another model, check --tokenizer"
            )
        return loaded

    def save(self, path: Path) -> None:
        """Write the vocabulary and its rules as tokenizer.json, without the chat template."""
        self._core.save(str(path))

    def to_json(self) -> str:
        """The JSON text that `save` writes."""
        return str(self._core.to_str())

    def disagreement(self, other: Tokenizer) -> str | None:
        """The difference of `other`'s vocabulary; None if every id means the same token."""
        own, theirs = self._core.get_vocab(), other._core.get_vocab()
        different = sum(theirs.get(token) != number for token, number in own.items())
        if not different and len(own) == len(theirs):
            return None
        return f"{len(theirs)} tokens, of which {len(own) - different} are among the model's {len(own)}"

    @property
    def vocab_size(self) -> int:
        """Number of tokens with a text; the model's logits may have more columns (padding)."""
        return int(self._core.get_vocab_size())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. With `add_special_tokens`, the tokenizer's post-processor adds BOS if the model needs it. Text of
        control tokens becomes control tokens. Raises ValueError for text that is not Unicode (lone surrogates)."""
        return self._encode([text], add_special_tokens)

    def _encode(self, pieces: list[str], add_special_tokens: bool) -> list[int]:
        """The token ids of all pieces in order, each piece encoded separately."""
        try:
            # Unlike `encode`, it lets other Python threads run meanwhile, and computes no offsets.
            encodings = self._core.encode_batch_fast(pieces, add_special_tokens=add_special_tokens)
            if len(encodings) == 1:
                ids: list[int] = encodings[0].ids
                return ids
            return [token for encoding in encodings for token in encoding.ids]
        except TypeError:  # the Rust library raises this for a str without a UTF-8 form
            raise ValueError("the text is not valid Unicode") from None

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text; bytes that are not UTF-8 become U+FFFD. Ids without a token are skipped. Raises ValueError for numbers
        that cannot be ids."""
        if len(token_ids) > DECODE_CHUNK_TOKENS:  # the Rust library holds the interpreter lock during a call
            decoder = IncrementalDecoder(self, skip_special_tokens)
            starts = range(0, len(token_ids), DECODE_CHUNK_TOKENS)
            return "".join([*(decoder.push(token_ids[i : i + DECODE_CHUNK_TOKENS]) for i in starts), decoder.flush()])
        try:
            return str(self._core.decode(list(token_ids), skip_special_tokens=skip_special_tokens))
        except OverflowError:
            raise ValueError("token ids must be between 0 and 2^32 - 1") from None

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Renders messages with the model's template and encodes the result; the template itself writes BOS.
        continue_final_message: the prompt ends with the last message's text. chat_template: replaces the model's.
        Raises ValueError for messages that are malformed or refused, and for a chat_template that is none.

        Only the template writes control tokens: a message that contains "<|im_end|>" ends no turn, and cannot forge a
        turn of another role."""
        template = self._template if chat_template is None else self._of_client(chat_template)
        if template is None:
            raise ValueError("this model has no chat template: use /v1/completions")
        sent = checked(messages)
        mark = self._controls.mark_for([sent, kwargs])
        if mark:
            sent, kwargs = self._controls.marked(sent, mark), self._controls.marked(kwargs, mark)
        end = self._controls.free_marks([sent, kwargs])[-1] if continue_final_message else ""
        if end:
            sent[-1]["content"] = (sent[-1]["content"] or "") + end
        text = template.render(sent, add_generation_prompt, **kwargs)
        if end:
            text, shown, _ = text.rpartition(end)
            if not shown:
                raise ValueError("continue_final_message: the chat template shows no text of the last message")
            text = text.replace(end, "")
        if not mark:
            return self.encode(text, add_special_tokens=False)
        return self._encode(text.split(mark), add_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to the output, for logprobs. Empty for ids without a token."""
        return self.bytes_of[token_id]

    def token_str(self, token_id: int) -> str:
        """`token_bytes` as text; a part of a character becomes U+FFFD."""
        return self.bytes_of[token_id].decode("utf-8", "replace")


class IncrementalDecoder:
    """Text of a growing list of tokens. All deltas and the flush together equal `Tokenizer.decode` of all tokens; only
    the number of U+FFFD for SentencePiece bytes that are not UTF-8 can differ."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, behind: Iterable[int] = ()) -> None:
        """behind: the tokens before these. If they have a text, this one continues it: a space at its begin stands
        between two words, and none is removed."""
        self._bytes = tokenizer.bytes_of
        self._skipped = self._bytes.special_ids if skip_special_tokens else frozenset[int]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        shown = (self._bytes[token] for token in behind if token not in self._skipped)
        self._strip = self._bytes.strips_first_space and not any(shown)

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens add, without the bytes of an incomplete last character."""
        data = b"".join(self._bytes[token] for token in token_ids if token not in self._skipped)
        if self._strip and data:
            data, self._strip = data.removeprefix(b" "), False
        return self._utf8.decode(data)

    def flush(self) -> str:
        """The rest at the end: U+FFFD for an incomplete character, else empty."""
        return self._utf8.decode(b"", final=True)


def _locate(source: ModelSource, tokenizer: str) -> Path:
    """A .gguf file, or the directory of a tokenizer.json."""
    if tokenizer == EMBEDDED_MODEL:
        return embedded_model()
    path = source.path if tokenizer == "auto" else Path(tokenizer).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return path
    directory = path.parent if path.name == "tokenizer.json" else path
    if not (directory / "tokenizer.json").is_file():
        raise ModelError(f"no tokenizer.json in {directory}: name a directory that has one with --tokenizer")
    return directory


def _from_gguf(path: Path) -> tuple[tokenizers.Tokenizer, str | None, dict[str, str]]:
    with GGUFFile(path) as file:
        template = file.metadata.get("tokenizer.chat_template")
        return gguf_tokenizer.build(file), template, gguf_tokenizer.special_tokens(file.metadata)


def _from_directory(directory: Path) -> tuple[tokenizers.Tokenizer, str | None, dict[str, str]]:
    try:
        core = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    except Exception as error:  # the Rust library raises plain Exception
        raise ModelError(f"{directory / 'tokenizer.json'} is not a tokenizer: {error}") from None
    path = directory / "tokenizer_config.json"
    config = read_json(path) if path.is_file() else {}
    texts = {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in config.items()
        if name.endswith("_token") and (isinstance(value, str) or (isinstance(value, dict) and "content" in value))
    }
    template = config.get("chat_template")
    if isinstance(template, list):  # several by name
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    jinja = directory / "chat_template.jinja"
    return core, jinja.read_text(encoding="utf-8") if jinja.is_file() else template, texts
