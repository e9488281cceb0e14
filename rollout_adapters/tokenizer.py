"""A Hugging Face tokenizer and its own chat template as a `ChatTokenizer`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from harness_bridges.errors import ConfigError


class HFChat:
    """Wraps `AutoTokenizer`; encodings of repeated template text are cached."""

    def __init__(self, tokenizer: Any, eos_ids: frozenset[int]) -> None:
        if not tokenizer.chat_template:
            raise ConfigError(
                f"{tokenizer.name_or_path}: the tokenizer has no chat template; agents need an "
                "instruct model"
            )
        self.tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._encode = lru_cache(maxsize=4096)(self._encode_uncached)

    @classmethod
    def from_pretrained(cls, path: str | Path) -> HFChat:
        """Load from a local model directory; end-of-turn ids come from its generation config."""
        from transformers import AutoTokenizer, GenerationConfig

        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        eos: set[int] = {tokenizer.eos_token_id} - {None}
        if (Path(path) / "generation_config.json").exists():
            configured = GenerationConfig.from_pretrained(path).eos_token_id
            eos |= set(configured if isinstance(configured, list) else [configured]) - {None}
        return cls(tokenizer, frozenset(eos))

    @property
    def eos_ids(self) -> frozenset[int]:
        return self._eos_ids

    def encode(self, text: str) -> list[int]:
        return list(self._encode(text))

    def _encode_uncached(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        from jinja2 import TemplateError

        try:
            text: str = self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ConfigError(
                f"{self.tokenizer.name_or_path}: its chat template refuses these messages "
                f"({roles}): {error}; choose a harness that keeps the order which it asks for, or "
                "a model whose template has none"
            ) from None
        return text
