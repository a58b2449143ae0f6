"""Build the SentencePiece model of the preset `pi05_tiny`.

    python scripts/build_tiny_tokenizer.py [output file]

It has the conventions of PaliGemma's tokenizer (ids of padding, end, beginning and unknown; digits apart; bytes for
what it does not know; newline as one token; nothing normalised) and a vocabulary of 896 pieces, trained on the
sentences below. With equal sentencepiece versions the result is equal byte for byte.
"""

from __future__ import annotations

import io
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import sentencepiece

OUTPUT = Path(__file__).parents[1] / "flashrt_ros" / "policies" / "pi05" / "assets" / "tiny_tokenizer.model"
VOCABULARY = 896

VERBS = (
    "pick up", "grasp", "lift", "push", "pull", "rotate", "turn", "slide", "place", "put", "move", "hand over", "wipe",
    "open", "close", "press", "stack", "unstack", "fold", "unfold", "pour", "insert", "remove", "sort", "point at",
)  # fmt: skip
COLOURS = ("red", "green", "blue", "yellow", "white", "black", "orange", "grey", "small", "large", "empty", "full")
THINGS = (
    "cup", "mug", "plate", "bowl", "bottle", "can", "box", "block", "cube", "ball", "spoon", "fork", "knife", "towel",
    "drawer", "door", "lid", "button", "switch", "handle", "screw", "nut", "gear", "cable", "book", "pen", "apple",
    "banana", "sponge", "tray", "basket", "pan", "kettle", "object", "rocket", "coffee cup", "cat",
)  # fmt: skip
PLACES = (
    "on the table", "into the box", "next to the plate", "behind the mug", "in front of the robot", "on the shelf",
    "into the sink", "under the lamp", "to the left", "to the right", "towards the camera", "away from you",
    "carefully", "with the gripper", "with both hands", "and put it down", "and hold it", "then stop", "slowly",
    "quickly",
)  # fmt: skip


def sentences() -> Iterator[str]:
    """Instructions, and prompts with a state behind them."""
    combinations = itertools.product(VERBS, COLOURS, THINGS, PLACES)
    for index, (verb, colour, thing, place) in enumerate(itertools.islice(combinations, 0, None, 7)):
        sentence = f"{verb} the {colour} {thing} {place}"
        state = " ".join(str((index * 37 + joint * 61) % 256) for joint in range(8))
        yield sentence
        yield f"Task: {sentence}, State: {state};\nAction: "


def build() -> bytes:
    """The serialised model."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=sentences(),
        model_writer=model,
        model_type="bpe",
        vocab_size=VOCABULARY,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        user_defined_symbols=["\n"],
        byte_fallback=True,
        split_digits=True,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def main() -> None:
    """Write the model and say how large it is."""
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT
    content = build()
    output.write_bytes(content)
    print(f"{output}: {len(content)} bytes")


if __name__ == "__main__":
    main()
