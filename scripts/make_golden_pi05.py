"""Record what LeRobot's own π0.5 computes at a tiny size: the golden data of test/policies/pi05/test_golden.py.

    python3.12 -m venv /tmp/lerobot && /tmp/lerobot/bin/pip install "lerobot[pi]==0.6.1" sentencepiece
    /tmp/lerobot/bin/python scripts/make_golden_pi05.py            # writes test/golden/pi05_tiny

Everything is done by LeRobot: it builds the policy and both processor pipelines, saves them as a checkpoint, and
decides on a few observations. Three things are replaced, because LeRobot fixes them to the true size:

* `get_gemma_config` returns tiny sizes;
* the PaliGemma and Gemma classes get a configuration whose vision encoder and vocabulary are shrunk just before they
  are built (PaliGemmaWithExpertModel writes the true sizes into it);
* the gated PaliGemma tokenizer is replaced by the SentencePiece model of the preset `pi05_tiny`.

All parameters are drawn anew. As LeRobot initialises them, the adaptive norms ignore the time and the norm weights are
zero, so that wrong time steps and wrong folding would go unnoticed.
"""

from __future__ import annotations

import json
import math
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import torch
from lerobot.configs import FeatureType, PolicyFeature  # type: ignore[import-not-found]
from lerobot.policies.pi05 import (  # type: ignore[import-not-found]
    PI05Config,
    PI05Policy,
    make_pi05_pre_post_processors,
    modeling_pi05,
)
from lerobot.processor import tokenizer_processor  # type: ignore[import-not-found]
from safetensors.torch import save_file
from torch import Tensor, nn

ROOT = Path(__file__).parents[1]
OUTPUT = ROOT / "test" / "golden" / "pi05_tiny"
TOKENIZER = ROOT / "flashrt_ros" / "policies" / "pi05" / "assets" / "tiny_tokenizer.model"
SEED = 5
LAYERS_KEPT = (0, 2)
STEPS = (1, 10)
PACKAGES = ("lerobot", "transformers", "torch")
JOINTS = ("waist.pos", "shoulder.pos", "elbow.pos", "wrist.pos", "tool.pos", "gripper.pos")
VIEWS = ("top", "wrist")

# The sizes, by the names of Pi05Config's fields.
SIZES = {
    "image_size": 56, "patch_size": 14, "vision_width": 64, "vision_layers": 2, "vision_heads": 4, "vision_hidden": 96,
    "layers": 3, "query_heads": 8, "key_heads": 1, "head_dim": 16, "vocabulary": 896, "language_width": 64,
    "language_hidden": 128, "expert_width": 48, "expert_hidden": 96,
}  # fmt: skip
CHUNK, LONGEST_PROMPT = 10, 96

# Task, height and width of each view, and the state's place between the quantiles.
CASES: tuple[tuple[str, tuple[tuple[int, int], ...], float], ...] = (
    ("pick up the red cup", ((60, 80), (96, 40)), 0.5),
    ("  open_the\ndrawer ", ((56, 56), (33, 57)), 0.1),
    ("wipe the table slowly, then put the sponge into the sink and close the lid", ((120, 67), (64, 64)), 1.3),
)


def tiny_gemma(variant: str) -> modeling_pi05.GemmaConfig:
    """Sizes of the prefix encoder ("gemma_2b") and of the expert ("gemma_300m")."""
    part = "language" if variant == "gemma_2b" else "expert"
    return modeling_pi05.GemmaConfig(
        width=SIZES[f"{part}_width"],
        depth=SIZES["layers"],
        mlp_dim=SIZES[f"{part}_hidden"],
        num_heads=SIZES["query_heads"],
        num_kv_heads=SIZES["key_heads"],
        head_dim=SIZES["head_dim"],
    )


def shrunk_paligemma(config: Any) -> nn.Module:
    """LeRobot's PaliGemma class, built on a shrunk configuration."""
    vision = config.vision_config
    vision.hidden_size, vision.num_hidden_layers = SIZES["vision_width"], SIZES["vision_layers"]
    vision.num_attention_heads, vision.intermediate_size = SIZES["vision_heads"], SIZES["vision_hidden"]
    vision.projection_dim = SIZES["language_width"]
    config.text_config.vocab_size = SIZES["vocabulary"]
    config.text_config.pad_token_id = 0
    model: nn.Module = PALIGEMMA(config=config)
    return model


def shrunk_gemma(config: Any) -> nn.Module:
    """LeRobot's Gemma class for the expert, with the small vocabulary."""
    config.vocab_size = SIZES["vocabulary"]
    model: nn.Module = GEMMA(config=config)
    return model


class SentencePieceTokenizer:
    """The part of a transformers tokenizer that LeRobot's processor calls."""

    def __init__(self) -> None:
        self.model = sentencepiece.SentencePieceProcessor(model_file=str(TOKENIZER))

    @classmethod
    def from_pretrained(cls, name: str) -> SentencePieceTokenizer:
        """Ignore the name; there is one tokenizer."""
        return cls()

    def __call__(self, texts: list[str], max_length: int, **_: Any) -> dict[str, Tensor]:
        """Ids behind a BOS token and their mask, int64[texts, max_length], padded on the right."""
        ids = torch.zeros((len(texts), max_length), dtype=torch.int64)
        mask = torch.zeros((len(texts), max_length), dtype=torch.int64)
        for row, text in enumerate(texts):
            tokens = [self.model.bos_id(), *self.model.encode(text)]
            ids[row, : len(tokens)] = torch.tensor(tokens)
            mask[row, : len(tokens)] = 1
        return {"input_ids": ids, "attention_mask": mask}


PALIGEMMA = modeling_pi05.PaliGemmaForConditionalGenerationWithPiGemma
GEMMA = modeling_pi05.PiGemmaForCausalLM
modeling_pi05.get_gemma_config = tiny_gemma
modeling_pi05.PaliGemmaForConditionalGenerationWithPiGemma = shrunk_paligemma
modeling_pi05.PiGemmaForCausalLM = shrunk_gemma
tokenizer_processor.AutoTokenizer = SentencePieceTokenizer


def policy_config() -> PI05Config:
    """Two cameras and a masked third, six joints, relative actions with an absolute gripper."""
    image = PolicyFeature(FeatureType.VISUAL, (3, 60, 80))
    vector = (len(JOINTS),)
    return PI05Config(
        input_features={
            **{f"observation.images.{view}": image for view in VIEWS},
            "observation.state": PolicyFeature(FeatureType.STATE, vector),
        },
        output_features={"action": PolicyFeature(FeatureType.ACTION, vector)},
        device="cpu",
        dtype="float32",
        chunk_size=CHUNK,
        n_action_steps=CHUNK,
        image_resolution=(SIZES["image_size"], SIZES["image_size"]),
        tokenizer_max_length=LONGEST_PROMPT,
        use_relative_actions=True,
        relative_exclude_joints=["gripper"],
        action_feature_names=list(JOINTS),
        empty_cameras=1,
    )


def statistics() -> dict[str, dict[str, Tensor]]:
    """Quantiles of state and action, unequal in every joint."""
    low = torch.linspace(-2.0, -0.5, len(JOINTS))
    high = torch.linspace(1.0, 2.5, len(JOINTS))
    return {
        "observation.state": {"q01": low, "q99": high},
        "action": {"q01": low / 10, "q99": high / 10},
    }


def enliven(policy: nn.Module) -> None:
    """Draw every parameter so that each one matters."""
    generator = torch.Generator().manual_seed(SEED)
    for module in policy.modules():
        for name, parameter in module.named_parameters(recurse=False):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data = _scaled(module, name, noise)


def _scaled(module: nn.Module, name: str, noise: Tensor) -> Tensor:
    if isinstance(module, nn.LayerNorm) and name == "weight":
        return 1 + 0.1 * noise
    if noise.ndim == 1:
        return 0.1 * noise
    return noise / math.sqrt(math.prod(noise.shape[1:]))


def photograph(size: tuple[int, int], generator: np.random.Generator) -> np.ndarray:
    """uint8[*size, 3] (height, width) with soft regions, one hard edge and a little grain."""
    height, width = size
    coarse = torch.from_numpy(generator.uniform(0, 255, (1, 3, 5, 5)))
    soft = nn.functional.interpolate(coarse, (height, width), mode="bilinear")[0].permute(1, 2, 0).numpy()
    soft[height // 3 :, width // 2 :] *= 0.4
    grainy = soft + generator.normal(0, 6, soft.shape)
    return np.clip(np.rint(grainy), 0, 255).astype(np.uint8)


def observation(task: str, images: dict[str, np.ndarray], state: Tensor) -> dict[str, Any]:
    """A frame as LeRobot's robots deliver it."""
    pixels = {
        f"observation.images.{view}": torch.from_numpy(image).permute(2, 0, 1).float() / 255
        for view, image in images.items()
    }
    return {**pixels, "observation.state": state, "task": task}


def record(
    policy: PI05Policy, processors: Any, case: tuple[str, tuple[tuple[int, int], ...], float], index: int
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Everything that one decision takes and gives."""
    task, sizes, place = case
    generator = np.random.default_rng(100 + index)
    images = {view: photograph(size, generator) for view, size in zip(VIEWS, sizes, strict=True)}
    bounds = statistics()["observation.state"]
    state = bounds["q01"] + place * (bounds["q99"] - bounds["q01"]) * torch.linspace(0.7, 1.0, len(JOINTS))
    preprocess, postprocess = processors
    batch = preprocess(observation(task, images, state))
    noise = torch.randn((1, CHUNK, policy.config.max_action_dim), generator=torch.Generator().manual_seed(index))

    tensors: dict[str, Tensor] = {"state": state, "noise": noise[0]}
    letterboxed, _ = policy._preprocess_images(batch)
    for position, view in enumerate(VIEWS):
        tensors[f"image.{view}"] = torch.from_numpy(images[view])
        tensors[f"letterboxed.{view}"] = letterboxed[position][0]
    tensors["tokens"] = batch["observation.language.tokens"][0].int()
    tensors["mask"] = batch["observation.language.attention_mask"][0].to(torch.uint8)
    for steps in STEPS:
        caches: list[Any] = []
        with recorded_caches(policy, caches):
            rows = policy.model.sample_actions(
                *policy._preprocess_images(batch),
                batch["observation.language.tokens"],
                batch["observation.language.attention_mask"].bool(),
                noise=noise,
                num_steps=steps,
            )
        tensors[f"actions.{steps}"] = rows[0]
    for layer, (key, value, *_) in enumerate(caches[0]):
        if layer in LAYERS_KEPT:
            tensors[f"key.{layer}"], tensors[f"value.{layer}"] = key[0].transpose(0, 1), value[0].transpose(0, 1)
    tensors["commands"] = postprocess(rows[:, :, : len(JOINTS)])[0]
    return tensors, {"task": task, "text": batch["task"][0]}


class recorded_caches:  # noqa: N801 - reads as a function where it is used
    """Within the block, keep the keys and values of every prefix pass in `caches`."""

    def __init__(self, policy: PI05Policy, caches: list[Any]) -> None:
        self.model, self.caches = policy.model.paligemma_with_expert, caches

    def __enter__(self) -> None:
        def forward(*args: Any, **kwargs: Any) -> Any:
            result = type(self.model).forward(self.model, *args, **kwargs)
            if kwargs["inputs_embeds"][1] is None:
                self.caches.append(list(result[1]))
            return result

        self.model.forward = forward

    def __exit__(self, *_: object) -> None:
        del self.model.forward


def main() -> None:
    """Write the checkpoint and the recorded decisions."""
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT
    output.mkdir(parents=True, exist_ok=True)
    policy = PI05Policy(policy_config()).eval()
    enliven(policy)
    processors = make_pi05_pre_post_processors(policy.config, statistics())
    policy.save_pretrained(output)
    for processor in processors:
        processor.save_pretrained(output)
    tensors: dict[str, Tensor] = {}
    texts: list[dict[str, str]] = []
    for index, case in enumerate(CASES):
        arrays, text = record(policy, processors, case, index)
        tensors |= {f"{index}.{name}": tensor.detach().contiguous() for name, tensor in arrays.items()}
        texts.append(text)
    save_file(tensors, output / "cases.safetensors")
    facts = {
        "made_by": {**{name: version(name) for name in PACKAGES}, "python": platform.python_version()},
        "sizes": SIZES, "joints": JOINTS, "views": VIEWS, "layers": LAYERS_KEPT, "steps": STEPS, "cases": texts,
    }  # fmt: skip
    (output / "cases.json").write_text(json.dumps(facts, indent=2) + "\n")
    print(f"{output}: {sum(path.stat().st_size for path in output.iterdir())} bytes")


if __name__ == "__main__":
    main()
