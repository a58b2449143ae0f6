"""The small tokenizer that the package ships, and the script that makes it."""

from __future__ import annotations

import hashlib

import sentencepiece

from flashrt_ros.policies.pi05.presets import SEEDED_PRESETS
from flashrt_ros.policies.pi05.tokenizer import Tokenizer
from scripts.build_tiny_tokenizer import build

PATH = SEEDED_PRESETS["pi05_tiny"].tokenizer
MODEL = sentencepiece.SentencePieceProcessor(model_file=str(PATH))
PIECES_BEFORE_TRAINED_ONES = 5 + 256  # four special ids, newline, bytes


def test_the_script_makes_the_shipped_file() -> None:
    assert hashlib.sha256(build()).hexdigest() == Tokenizer(PATH).digest


def test_it_is_small() -> None:
    assert PATH.stat().st_size < 200_000
    assert Tokenizer(PATH).size == 896


def test_special_ids_are_those_of_paligemma() -> None:
    assert (MODEL.pad_id(), MODEL.eos_id(), MODEL.bos_id(), MODEL.unk_id()) == (0, 1, 2, 3)


def test_digits_and_newlines_stand_alone() -> None:
    assert MODEL.encode("12\n", out_type=str) == ["1", "2", "\n"]


def test_whatever_it_does_not_know_becomes_bytes_and_comes_back() -> None:
    text = "naïve  猫 \t😀"
    ids = MODEL.encode(text)
    assert MODEL.unk_id() not in ids
    assert MODEL.decode(ids) == text


def test_encoding_starts_with_bos_once() -> None:
    ids = Tokenizer(PATH).encode("pick up the cup")
    assert ids[0] == 2
    assert ids.count(2) == 1
    assert all(index >= PIECES_BEFORE_TRAINED_ONES for index in ids[1:])
