"""Nine models that nobody here wrote: built by their own packages, with seeded weights, at their true sizes or tiny."""

from __future__ import annotations

import hashlib
import importlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from flashrt_ros.measure.pi05.official import sizes_of
from flashrt_ros.policies.pi05.config import Pi05Config

EXAMPLES = 3
_SPREAD = {"norm": 0.1, "dense": 0.02, "bias": 0.02, "embed": 0.5}
_BACK = re.compile(r"(o_proj|out_proj|down_proj|fc2|attn\.proj|linear2|c_proj)\.weight$")


@dataclass(frozen=True)
class Workload:
    """A model, its complete call and some inputs.

    `size` says in words what was built.
    """

    model: nn.Module
    method: str
    examples: list[tuple[tuple[Any, ...], dict[str, Any]]]
    size: str


@dataclass(frozen=True)
class Setting:
    """Where a model is built, and whether at its true size."""

    device: torch.device
    tiny: bool

    def pick(self, true: Any, tiny: Any) -> Any:
        """One of two sizes."""
        return tiny if self.tiny else true

    def randn(self, *shape: int, seed: int = 0) -> Tensor:
        """float32 noise that a seed and the shape decide."""
        generator = torch.Generator().manual_seed(seed * 7919 + math.prod(shape))
        return torch.randn(*shape, generator=generator).to(self.device)

    def pixels(self, *shape: int, seed: int = 0) -> Tensor:
        """float32 between -1 and 1, smooth as photographs are."""
        height, width = shape[-2:]
        coarse = self.randn(*shape[:-2], max(2, height // 16), max(2, width // 16), seed=seed)
        return torch.nn.functional.interpolate(coarse, size=(height, width), mode="bilinear").tanh()

    def tokens(self, count: int, vocabulary: int, seed: int = 0) -> Tensor:
        """int64[1, count]."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(3, vocabulary, (1, count), generator=generator).to(self.device)


def seed_weights(model: nn.Module, depth: int) -> None:
    """Draw every parameter anew, so that no norm is neutral and signals neither vanish nor explode over `depth` layers.

    Vectors that stand at one (or, in norms that add one, at zero) are spread around it; matrices have variance
    1 / inputs, those that lead back to the residual 1 / (2 * depth * inputs).
    """
    for name, parameter in model.named_parameters():
        digest = hashlib.sha256(name.encode()).digest()
        generator = torch.Generator(parameter.device).manual_seed(int.from_bytes(digest[:7], "little"))
        drawn = torch.empty(parameter.shape, device=parameter.device).normal_(generator=generator)
        with torch.no_grad():
            parameter.copy_(drawn * _spread(name, parameter, depth) + _centre(name, parameter))


def _centre(name: str, parameter: Tensor) -> float:
    return round(float(parameter.float().mean())) if parameter.ndim == 1 and not name.endswith("bias") else 0.0


def _spread(name: str, parameter: Tensor, depth: int) -> float:
    if name.endswith("bias"):
        return _SPREAD["bias"]
    if ".dense." in name:
        return _SPREAD["dense"]
    if parameter.ndim == 1:
        return _SPREAD["norm"]
    if "embed" in name and "proj" not in name and parameter.ndim == 2:
        return _SPREAD["embed"]
    inputs = math.prod(parameter.shape[1:])
    return 1 / math.sqrt(inputs * (2 * depth if _BACK.search(name) else 1))


# -- LeRobot -----------------------------------------------------------------------------------------------------------

_TINY_PI = {
    "image_size": 28, "patch_size": 14, "vision_width": 64, "vision_layers": 2, "vision_heads": 4, "vision_hidden": 96,
    "layers": 3, "query_heads": 8, "key_heads": 1, "head_dim": 16, "vocabulary": 896, "language_width": 64,
    "language_hidden": 128, "expert_width": 48, "expert_hidden": 96,
}  # fmt: skip


def _pi(setting: Setting, name: str, module: str, config: str, network: str) -> tuple[nn.Module, dict[str, Any]]:
    sizes = Pi05Config(views=("a",), state_in_prompt=False, action_names=("a",), **setting.pick({}, _TINY_PI))
    modeling = importlib.import_module(module)
    lerobot = getattr(importlib.import_module(f"lerobot.policies.{name}.configuration_{name}"), config)
    settings = lerobot(
        dtype=setting.pick("bfloat16", "float32"),
        chunk_size=setting.pick(10, 6),
        n_action_steps=setting.pick(10, 6),
        device=str(setting.device),
        image_resolution=(sizes.image_size, sizes.image_size),
        num_inference_steps=setting.pick(10, 3),
    )
    with sizes_of(sizes, module), torch.device(setting.device):
        model = getattr(modeling, network)(settings).eval()
    seed_weights(model, sizes.layers)
    return model, {"size": sizes.image_size, "vocabulary": sizes.vocabulary, "chunk": settings.chunk_size}


def _pi_inputs(setting: Setting, facts: Mapping[str, Any], prompt: int, seed: int) -> dict[str, Any]:
    """Two images and a prompt of almost `prompt` tokens, which is what the model pads to."""
    size, ones = facts["size"], torch.ones(1, dtype=torch.bool, device=setting.device)
    valid = torch.arange(prompt, device=setting.device)[None] < prompt - seed
    return {
        "images": [setting.pixels(1, 3, size, size, seed=2 * seed + view) for view in range(2)],
        "img_masks": [ones, ones],
        "noise": setting.randn(1, facts["chunk"], 32, seed=seed),
        "mask": valid,
        "text": setting.tokens(prompt, facts["vocabulary"], seed) * valid,
    }


def lerobot_pi05(setting: Setting) -> Workload:
    """LeRobot's π0.5: 2 views, 200 prompt tokens, chunk 10, 10 steps; bfloat16 with vision and norms in float32."""
    module = "lerobot.policies.pi05.modeling_pi05"
    model, facts = _pi(setting, "pi05", module, "PI05Config", "PI05Pytorch")
    examples = []
    for seed in range(EXAMPLES):
        inputs = _pi_inputs(setting, facts, setting.pick(200, 16), seed)
        inputs |= {"tokens": inputs.pop("text"), "masks": inputs.pop("mask")}
        examples.append(((), inputs))
    return Workload(model, "sample_actions", examples, "2 views, 200 tokens, chunk 10, 10 steps, bfloat16")


def lerobot_pi0(setting: Setting) -> Workload:
    """LeRobot's π0: as π0.5, 48 prompt tokens and the state as a vector."""
    module = "lerobot.policies.pi0.modeling_pi0"
    model, facts = _pi(setting, "pi0", module, "PI0Config", "PI0Pytorch")
    examples = []
    for seed in range(EXAMPLES):
        inputs = _pi_inputs(setting, facts, setting.pick(48, 16), seed)
        inputs |= {"lang_tokens": inputs.pop("text"), "lang_masks": inputs.pop("mask")}
        examples.append(((), {**inputs, "state": setting.randn(1, 32, seed=seed)}))
    return Workload(model, "sample_actions", examples, "2 views, 48 tokens, chunk 10, 10 steps, bfloat16")


class _Processor:
    """What SmolVLA reads of its tokenizer, which is not on this machine: two token ids."""

    class tokenizer:  # noqa: N801
        fake_image_token_id, global_image_token_id = 1, 2


def lerobot_smolvla(setting: Setting) -> Workload:
    """LeRobot's SmolVLA on SmolVLM2-500M's sizes: 2 views of 512, 48 tokens, chunk 50, 10 steps, float32."""
    configuration = importlib.import_module("lerobot.policies.smolvla.configuration_smolvla")
    modeling = importlib.import_module("lerobot.policies.smolvla.modeling_smolvla")
    around = importlib.import_module("lerobot.policies.smolvla.smolvlm_with_expert")
    config = configuration.SmolVLAConfig(
        device=str(setting.device), num_vlm_layers=setting.pick(16, 2), num_steps=setting.pick(10, 3), chunk_size=50
    )
    vlm = _smolvlm(setting)
    with (
        patch.object(around.AutoConfig, "from_pretrained", lambda *_, **__: vlm),
        patch.object(around.AutoProcessor, "from_pretrained", lambda *_, **__: _Processor),
        torch.device(setting.device),
    ):
        model = modeling.VLAFlowMatching(config).to(setting.device).eval()
    seed_weights(model, config.num_vlm_layers)
    size, ones = vlm.vision_config.image_size, torch.ones(1, dtype=torch.bool, device=setting.device)
    examples = []
    for seed in range(EXAMPLES):
        inputs = {
            "images": [setting.pixels(1, 3, size, size, seed=2 * seed + view) for view in range(2)],
            "img_masks": [ones, ones],
            "lang_tokens": setting.tokens(48, vlm.text_config.vocab_size, seed),
            "lang_masks": torch.ones(1, 48, dtype=torch.bool, device=setting.device),
            "state": setting.randn(1, 32, seed=seed),
            "noise": setting.randn(1, 50, 32, seed=seed),
        }
        examples.append(((), inputs))
    return Workload(model, "sample_actions", examples, "2 views of 512, 48 tokens, chunk 50, 10 steps, float32")


def _smolvlm(setting: Setting) -> Any:
    """The configuration of SmolVLM2-500M-Video-Instruct, or a small one of its kind."""
    config = importlib.import_module("transformers").SmolVLMConfig
    text = {
        "model_type": "llama", "hidden_size": setting.pick(960, 96), "num_hidden_layers": setting.pick(32, 2),
        "num_attention_heads": setting.pick(15, 3), "num_key_value_heads": setting.pick(5, 1),
        "intermediate_size": setting.pick(2560, 128), "vocab_size": setting.pick(49280, 300),
        "head_dim": setting.pick(64, 32), "rope_theta": 100000, "pad_token_id": 0,
    }  # fmt: skip
    vision = {
        "hidden_size": setting.pick(768, 64), "num_hidden_layers": setting.pick(12, 2),
        "num_attention_heads": setting.pick(12, 4), "intermediate_size": setting.pick(3072, 96), "patch_size": 16,
        "image_size": setting.pick(512, 128),
    }  # fmt: skip
    return config(text_config=text, vision_config=vision, scale_factor=4, image_token_id=setting.pick(49190, 290))


def _features(cameras: int, state: int, size: tuple[int, int]) -> dict[str, Any]:
    types = importlib.import_module("lerobot.configs.types")
    feature, kind = types.PolicyFeature, types.FeatureType
    images = {f"observation.images.{i}": feature(kind.VISUAL, (3, *size)) for i in range(cameras)}
    return {
        "input_features": {**images, "observation.state": feature(kind.STATE, (state,))},
        "output_features": {"action": feature(kind.ACTION, (state,))},
    }


def lerobot_act(setting: Setting) -> Workload:
    """LeRobot's ACT: 2 cameras of 480x640, 14 joints, chunk 100, ResNet-18, float32."""
    configuration = importlib.import_module("lerobot.policies.act.configuration_act")
    modeling = importlib.import_module("lerobot.policies.act.modeling_act")
    height, width = setting.pick((480, 640), (64, 96))
    config = configuration.ACTConfig(
        pretrained_backbone_weights=None, device=str(setting.device), **_features(2, 14, (height, width))
    )
    with torch.device(setting.device):
        model = modeling.ACT(config).to(setting.device).eval()
    seed_weights(model, config.n_encoder_layers)
    examples = []
    for seed in range(EXAMPLES):
        images = [setting.pixels(1, 3, height, width, seed=2 * seed + view) for view in range(2)]
        batch = {"observation.images": images, "observation.state": setting.randn(1, 14, seed=seed)}
        examples.append(((batch,), {}))
    return Workload(model, "forward", examples, "2 cameras of 480x640, 14 joints, chunk 100, float32")


def lerobot_diffusion(setting: Setting) -> Workload:
    """LeRobot's Diffusion Policy: one camera of 96x96, 2 joints, horizon 64, 100 DDPM steps, float32."""
    configuration = importlib.import_module("lerobot.policies.diffusion.configuration_diffusion")
    modeling = importlib.import_module("lerobot.policies.diffusion.modeling_diffusion")
    config = configuration.DiffusionConfig(
        pretrained_backbone_weights=None,
        device=str(setting.device),
        num_inference_steps=setting.pick(100, 4),
        down_dims=setting.pick((512, 1024, 2048), (32, 64, 128)),
        **_features(1, 2, (96, 96)),
    )
    with torch.device(setting.device):
        model = modeling.DiffusionModel(config).to(setting.device).eval()
    seed_weights(model, 8)
    examples = []
    for seed in range(EXAMPLES):
        batch = {
            "observation.images": setting.pixels(2, 3, 96, 96, seed=seed).view(1, 2, 1, 3, 96, 96),
            "observation.state": setting.randn(1, 2, 2, seed=seed),
        }
        examples.append(((batch,), {"noise": setting.randn(1, config.horizon, 2, seed=seed)}))
    return Workload(model, "generate_actions", examples, "1 camera of 96x96, horizon 64, 100 steps, float32")


# -- transformers and timm ---------------------------------------------------------------------------------------------


def _transformer(setting: Setting, kind: str, config: Any, depth: int) -> nn.Module:
    transformers = importlib.import_module("transformers")
    dtype = setting.pick(torch.bfloat16, torch.float32)
    with torch.device(setting.device):
        model: nn.Module = getattr(transformers, kind)(config).to(setting.device, dtype).eval()
    seed_weights(model, depth)
    return model


def siglip(setting: Setting) -> Workload:
    """transformers' SigLIP So400m vision model, one image of 224, bfloat16."""
    transformers = importlib.import_module("transformers")
    layers, size = setting.pick(27, 2), setting.pick(224, 56)
    config = transformers.SiglipVisionConfig(
        hidden_size=setting.pick(1152, 64), intermediate_size=setting.pick(4304, 96), num_hidden_layers=layers,
        num_attention_heads=setting.pick(16, 4), image_size=size, patch_size=14,
    )  # fmt: skip
    model = _transformer(setting, "SiglipVisionModel", config, layers)
    dtype = next(model.parameters()).dtype
    images = [setting.pixels(1, 3, size, size, seed=seed).to(dtype) for seed in range(EXAMPLES)]
    examples: list[Any] = [((), {"pixel_values": image}) for image in images]
    return Workload(model, "forward", examples, "So400m, 1 image of 224, bfloat16")


def gemma(setting: Setting) -> Workload:
    """transformers' Gemma 2B, 128 tokens, without the cache, bfloat16."""
    transformers = importlib.import_module("transformers")
    layers, vocabulary = setting.pick(18, 2), setting.pick(256000, 500)
    config = transformers.GemmaConfig(
        hidden_size=setting.pick(2048, 64), intermediate_size=setting.pick(16384, 128), num_hidden_layers=layers,
        num_attention_heads=setting.pick(8, 4), num_key_value_heads=1, head_dim=setting.pick(256, 16),
        vocab_size=vocabulary, hidden_activation="gelu_pytorch_tanh",
    )  # fmt: skip
    model = _transformer(setting, "GemmaForCausalLM", config, layers)
    return Workload(model, "forward", _texts(setting, vocabulary), "2B, 128 tokens, last logits, bfloat16")


def qwen3(setting: Setting) -> Workload:
    """transformers' Qwen3 0.6B, 128 tokens, without the cache, bfloat16."""
    transformers = importlib.import_module("transformers")
    layers, vocabulary = setting.pick(28, 2), setting.pick(151936, 500)
    config = transformers.Qwen3Config(
        hidden_size=setting.pick(1024, 64), intermediate_size=setting.pick(3072, 128), num_hidden_layers=layers,
        num_attention_heads=setting.pick(16, 4), num_key_value_heads=setting.pick(8, 2),
        head_dim=setting.pick(128, 16), vocab_size=vocabulary, tie_word_embeddings=True,
    )  # fmt: skip
    model = _transformer(setting, "Qwen3ForCausalLM", config, layers)
    return Workload(model, "forward", _texts(setting, vocabulary), "0.6B, 128 tokens, last logits, bfloat16")


def _texts(setting: Setting, vocabulary: int) -> list[Any]:
    count = setting.pick(128, 12)
    tokens = [setting.tokens(count, vocabulary, seed) for seed in range(EXAMPLES)]
    return [((), {"input_ids": ids, "use_cache": False, "logits_to_keep": 1}) for ids in tokens]


def timm_vit(setting: Setting) -> Workload:
    """timm's ViT-B/16, one image of 224, bfloat16."""
    timm = importlib.import_module("timm")
    name = setting.pick("vit_base_patch16_224", "vit_tiny_patch16_224")
    dtype = setting.pick(torch.bfloat16, torch.float32)
    with torch.device(setting.device):
        model = timm.create_model(name, pretrained=False).to(setting.device, dtype).eval()
    seed_weights(model, 12)
    images = [setting.pixels(1, 3, 224, 224, seed=seed).to(dtype) for seed in range(EXAMPLES)]
    examples: list[Any] = [((image,), {}) for image in images]
    return Workload(model, "forward", examples, "ViT-B/16, 1 image of 224, bfloat16")


MODELS: Mapping[str, Callable[[Setting], Workload]] = {
    function.__name__: function
    for function in (
        lerobot_pi05,
        lerobot_pi0,
        lerobot_smolvla,
        lerobot_act,
        lerobot_diffusion,
        siglip,
        gemma,
        qwen3,
        timm_vit,
    )
}
"""Name → what builds it."""
