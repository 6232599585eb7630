"""Text to tokens and back, as one model folder has it; with its chat template, where it has one.

Owns how an episode's first context is made and what is appended to it after a turn. Tokens that were sampled
stay as they are: only what others say is ever tokenised. Reads the tokenizer, not the model: no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from executor.chat import chat_of
from executor.environments.problems import Observation, Problem, Role
from executor.environments.tool_calls import describe
from marlaas.errors import InputError
from marlaas.spec import ChatSpec

AUTO = ChatSpec()
NO_LIMIT = 1 << 30


class Codec:
    """Text to tokens and back for one model folder."""

    def __init__(self, model_folder: Path, chat: ChatSpec = AUTO) -> None:
        file = model_folder / "tokenizer.json"
        if not file.is_file():
            problem = f"{model_folder} has no tokenizer.json"
            raise InputError("model.path", problem, "name the folder of a Hugging Face model")
        self._tokenizer = Tokenizer.from_file(str(file))
        self._end_tokens = _end_tokens(model_folder)
        self._chat = chat_of(model_folder, chat)
        added = self._tokenizer.get_added_tokens_decoder().values()
        self._special = [token.content for token in added if token.special]

    @property
    def is_chat(self) -> bool:
        """Whether turns are written with a chat template."""
        return self._chat is not None

    @property
    def num_setting_tokens(self) -> int:
        """How many tokens a template puts around an observation, or 0 without one."""
        roles: tuple[Role, ...] = ("user", "tool") if self._chat is not None else ()
        empty = (Observation(done=False, role=role) for role in roles)
        return max((len(self.after_turn(each, NO_LIMIT, is_closed=False)) for each in empty), default=0)

    def opening(self, problem: Problem, limit: int) -> list[int]:
        """The first context, at most `limit` tokens: of a prompt that is too long the end is kept."""
        if self._chat is None:
            tools = [describe(problem.tools)] if problem.tools else []
            parts = [problem.system] if problem.system else []
            return self.encode_prompt("\n\n".join([*parts, *tools, self._defused(problem.prompt)]), limit)
        chat = self._chat
        return self._fitted(
            self._defused(problem.prompt),
            lambda text: chat.opening(problem, text),
            limit,
            lambda tokens, room: tokens[-room:],
        )

    def after_turn(self, observation: Observation, limit: int, *, is_closed: bool) -> list[int]:
        """What a context gains between two turns, at most `limit` tokens; a text too long loses its end.

        `is_closed` tells whether the turn before ended with an end token, which is then not written twice.
        """
        if self._chat is None:
            text = f"\n{observation.text}\n" if observation.role == "tool" else observation.text
            return self.encode_observation(self._defused(text), limit)
        chat = self._chat
        tokens = self._fitted(
            self._defused(observation.text),
            lambda text: chat.after_turn(text, observation.role),
            limit + is_closed,
            lambda tokens, room: tokens[:room],
        )
        return tokens[1:] if is_closed and tokens[0] in self._end_tokens else tokens[:limit]

    def encode_prompt(self, text: str, limit: int) -> list[int]:
        """At most the last `limit` tokens: the question is at the end."""
        tokens: list[int] = self._tokenizer.encode(text).ids
        return tokens[-limit:]

    def encode_observation(self, text: str, limit: int) -> list[int]:
        """At most the first `limit` tokens, none of them added by the tokenizer."""
        return self._encode(text)[:limit]

    def is_closed(self, tokens: list[int]) -> bool:
        """Whether a turn's tokens end with an end token."""
        return bool(tokens) and tokens[-1] in self._end_tokens

    def decode_turn(self, tokens: list[int]) -> str:
        """The text of a turn without the end token that closed it; other special tokens stay visible."""
        return self._decode(tokens[:-1] if self.is_closed(tokens) else tokens)

    def _fitted(
        self,
        text: str,
        render: Callable[[str], str],
        limit: int,
        cut: Callable[[list[int], int], list[int]],
    ) -> list[int]:
        """Tokens of `text` in its setting; cut so far that both fit, down to the setting alone."""
        tokens = self._encode(render(text))
        own = self._encode(text)
        room = len(own)
        while len(tokens) > limit and room > 0:
            room = max(0, room - (len(tokens) - limit))
            tokens = self._encode(render(self._decode(cut(own, room)) if room else ""))
        return tokens[:limit]

    def _defused(self, text: str) -> str:
        """Text from outside in which nothing reads as a special token, such as one that ends a turn."""
        for token in self._special:
            text = text.replace(token, f"{token[0]} {token[1:]}")
        return text

    def _encode(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return tokens

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return text


def _end_tokens(model_folder: Path) -> frozenset[int]:
    """The end tokens that the model folder declares, in its generation settings or else its configuration."""
    for name in ("generation_config.json", "config.json"):
        file = model_folder / name
        declared = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
        if declared is not None:
            return frozenset([declared] if isinstance(declared, int) else declared)
    return frozenset()
