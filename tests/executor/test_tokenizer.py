"""The character tokenizer: exact both ways, small, and loadable as any Hugging Face tokenizer."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from executor.tokenizer import CHARACTERS, EOS, UNKNOWN, character_tokenizer

TOKENIZER = character_tokenizer()
BASE = Path(__file__).parents[2] / "executor" / "models" / "tiny-base"


@settings(max_examples=50)
@given(st.text(alphabet=CHARACTERS, max_size=200))
def test_text_survives_the_round_trip(text: str) -> None:
    """Decoding gives back exactly what was encoded, one token a character, blanks and newlines included."""
    tokens = TOKENIZER.encode(text)
    assert len(tokens) == len(text)
    assert TOKENIZER.decode(tokens) == text


def test_special_tokens_are_four_and_never_added() -> None:
    """The vocabulary is the characters and four special tokens, none of which encoding adds."""
    assert len(TOKENIZER) == len(CHARACTERS) + 4
    assert [TOKENIZER.pad_token_id, TOKENIZER.bos_token_id, TOKENIZER.eos_token_id] == [0, 1, 2]
    assert not set(TOKENIZER.all_special_ids) & set(TOKENIZER.encode(CHARACTERS))


def test_other_characters_become_unknown() -> None:
    """A character outside printable ASCII costs one unknown token instead of an error."""
    assert TOKENIZER.convert_ids_to_tokens(TOKENIZER.encode("é字")) == [UNKNOWN, UNKNOWN]


@pytest.mark.parametrize("folder", ["saved", "shipped"])
def test_a_folder_holds_the_same_tokenizer(folder: str, tmp_path: Path) -> None:
    """Saved anew or shipped with the base, `AutoTokenizer` loads the very same tokenizer."""
    TOKENIZER.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path if folder == "saved" else BASE)
    assert loaded.get_vocab() == TOKENIZER.get_vocab()
    assert loaded.eos_token == EOS
    assert loaded.decode(loaded.encode("a  b, c .\n'd")) == "a  b, c .\n'd"
