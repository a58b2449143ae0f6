"""LeRobot's own π0.5, loaded from the same files, on the same inputs.

Everything here is LeRobot's code. Only where a checkpoint is smaller than the true size are LeRobot's fixed sizes
replaced while the model is built.
"""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors import safe_open
from torch import Tensor

from ...policies.pi05.checkpoint import WEIGHTS_FILE
from ...policies.pi05.config import Pi05Config
from ...policies.pi05.layout import canonical_names
from ...policies.pi05.lerobot import read_lerobot
from ..errors import MeasureError
from .observations import Observation

VERSION = "0.6.1"
_MODULE = "lerobot.policies.pi05.modeling_pi05"
_TRUE = Pi05Config(views=("a",), state_names=("a",), action_names=("a",))
_SIZES = (
    "vision_width", "vision_layers", "vision_heads", "vision_hidden", "layers", "query_heads", "key_heads", "head_dim",
    "vocabulary", "language_width", "language_hidden", "expert_width", "expert_hidden", "patch_size",
)  # fmt: skip


def lerobot_version() -> str | None:
    """The version of LeRobot if its π0.5 can be imported here, None otherwise."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        importlib.import_module(_MODULE)
        return version("lerobot")
    except (ImportError, PackageNotFoundError):
        return None


@dataclass(frozen=True)
class Inputs:
    """An observation as LeRobot's `sample_actions` takes it, on the model's device."""

    images: list[Tensor]
    img_masks: list[Tensor]
    tokens: Tensor
    masks: Tensor
    noise: Tensor

    def keywords(self) -> dict[str, Any]:
        """Arguments of `sample_actions`; their order changes between releases, their names do not."""
        return dict(vars(self))


class Official:
    """LeRobot's policy in one precision.

    Args:
        folder: a LeRobot checkpoint.
        config: our reading of the same folder; it gives sizes and views.
        dtype: "float32", or "bfloat16", where LeRobot keeps vision and norms in float32.

    Raises:
        MeasureError: LeRobot is not installed or another version, or it did not load every weight of the file.
    """

    def __init__(self, folder: Path, config: Pi05Config, dtype: str, device: torch.device) -> None:
        _require_lerobot()
        self.config, self.device = config, device
        with sizes_of(config):
            self.policy = _load(folder, dtype, device)
        _check_weights(self.policy, folder)
        checkpoint = read_lerobot(folder)
        keys = [key for key in self.policy.config.image_features if "empty_camera" not in key]
        self._keys = {view: key for view, key in zip(checkpoint.views, keys, strict=True) if view in config.views}

    def inputs(self, observation: Observation) -> Inputs:
        """Prepare `observation` with LeRobot's own image code; tokens are padded to the longest prompt."""
        batch = {self._keys[view]: self._pixels(image) for view, image in observation.images.items()}
        images, masks = self.policy._preprocess_images(batch)
        present = len(observation.images)  # LeRobot puts absent cameras, masked, behind those that are there
        longest, count = self.config.prompt_buckets[-1], len(observation.tokens)
        tokens = torch.zeros((1, longest), dtype=torch.int64, device=self.device)
        tokens[0, :count] = torch.from_numpy(observation.tokens)
        valid = torch.arange(longest, device=self.device)[None] < count
        noise = torch.from_numpy(observation.noise)[None].to(self.device)
        return Inputs(images[:present], masks[:present], tokens, valid, noise)

    def decide(self, inputs: Inputs, steps: int) -> Tensor:
        """float32[1, chunk, padded width]: `sample_actions`."""
        actions: Tensor = self.policy.model.sample_actions(**inputs.keywords(), num_steps=steps)
        return actions

    def compiled(self) -> Callable[..., Tensor]:
        """`sample_actions` as LeRobot's switch `compile_model` compiles it, in torch.compile's default mode.

        That switch also allows TF32 in the whole process.
        """
        torch.set_float32_matmul_precision("high")
        compiled: Callable[..., Tensor] = torch.compile(self.policy.model.sample_actions, mode="default")
        return compiled

    def decide_and_record(self, inputs: Inputs, steps: int) -> tuple[Tensor, Tensor]:
        """`decide`, and float32[layers, 2, valid rows, key width]: keys and values of the valid prefix rows."""
        caches: list[Any] = []
        with recorded_caches(self.policy.model.paligemma_with_expert, caches):
            actions = self.decide(inputs, steps)
        rows = torch.ones(sum(self._rows(image) for image in inputs.images), dtype=torch.bool, device=self.device)
        valid = torch.cat((rows, inputs.masks[0]))
        parts = [torch.stack((key[0], value[0])).transpose(1, 2).flatten(2)[:, valid] for key, value, *_ in caches[0]]
        return actions, torch.stack(parts).float()

    def _rows(self, image: Tensor) -> int:
        return (int(image.shape[-1]) // self.config.patch_size) ** 2

    def _pixels(self, image: Any) -> Tensor:
        return torch.from_numpy(image).to(self.device).permute(2, 0, 1)[None].float() / 255


@contextlib.contextmanager
def recorded_caches(model: Any, caches: list[Any]) -> Iterator[None]:
    """Within the block, the keys and values of every prefix pass of `model` are appended to `caches`."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        result = type(model).forward(model, *args, **kwargs)
        if kwargs["inputs_embeds"][1] is None:
            caches.append(list(result[1]))
        return result

    model.forward = forward
    try:
        yield
    finally:
        del model.forward


def _require_lerobot() -> None:
    found = lerobot_version()
    if found is None:
        raise MeasureError(
            f"LeRobot cannot be imported here; the official implementation needs Python 3.12 and "
            f"`pip install 'lerobot[pi]=={VERSION}'`"
        )
    if found != VERSION:
        raise MeasureError(f"LeRobot {found} is installed, the comparison is defined against {VERSION}")


def _load(folder: Path, dtype: str, device: torch.device) -> Any:
    configs = importlib.import_module("lerobot.configs")
    modeling = importlib.import_module(_MODULE)
    config = configs.PreTrainedConfig.from_pretrained(folder)
    config.dtype, config.device = dtype, str(device)
    config.compile_model = False
    said = io.StringIO()
    # Building on the device itself spares the minute that initialising random weights on the host takes.
    with contextlib.redirect_stdout(said), torch.device(device):
        policy = modeling.PI05Policy.from_pretrained(folder, config=config, strict=True)
    return policy.eval()


def _check_weights(policy: Any, folder: Path) -> None:
    """LeRobot only prints a warning when it returns random weights, so every parameter is compared with the file."""
    with safe_open(folder / WEIGHTS_FILE, framework="pt") as opened:
        file: Any = opened
        stored = canonical_names(file.keys())
        for name, parameter in policy.model.named_parameters():
            canonical = next(iter(canonical_names([name])), None)
            if canonical is None:
                continue  # the expert's output head, which nothing uses
            if canonical not in stored or not _equal(parameter.data, file.get_tensor(stored[canonical])):
                raise MeasureError(f"LeRobot did not load '{name}' from '{folder}'; nothing can be compared with it")


def _equal(parameter: Tensor, stored: Tensor) -> bool:
    return torch.equal(parameter, stored.to(parameter.device, parameter.dtype))


@contextlib.contextmanager
def sizes_of(config: Pi05Config, module: str = _MODULE) -> Iterator[None]:
    """Within the block, LeRobot builds a model of the sizes of `config`; nothing is changed at the true size.

    `module` is where it defines the model; that of π0 works too.
    """
    if all(getattr(config, name) == getattr(_TRUE, name) for name in _SIZES):
        yield
        return
    modeling = importlib.import_module(module)
    names = ("PaliGemmaForConditionalGenerationWithPiGemma", "PiGemmaForCausalLM")
    paligemma, gemma = (getattr(modeling, name) for name in names)
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(modeling, "get_gemma_config", partial(_gemma_sizes, modeling, config)))
        stack.enter_context(patch.object(modeling, names[0], partial(_shrunk_paligemma, paligemma, config)))
        stack.enter_context(patch.object(modeling, names[1], partial(_shrunk_gemma, gemma, config)))
        yield


def _gemma_sizes(modeling: Any, config: Pi05Config, variant: str) -> Any:
    part = "language" if variant == "gemma_2b" else "expert"
    return modeling.GemmaConfig(
        width=getattr(config, f"{part}_width"),
        depth=config.layers,
        mlp_dim=getattr(config, f"{part}_hidden"),
        num_heads=config.query_heads,
        num_kv_heads=config.key_heads,
        head_dim=config.head_dim,
    )


def _shrunk_paligemma(build: Any, ours: Pi05Config, config: Any) -> Any:
    vision, text = config.vision_config, config.text_config
    vision.hidden_size, vision.num_hidden_layers = ours.vision_width, ours.vision_layers
    vision.num_attention_heads, vision.intermediate_size = ours.vision_heads, ours.vision_hidden
    vision.patch_size, vision.projection_dim = ours.patch_size, ours.language_width
    text.vocab_size, text.pad_token_id = ours.vocabulary, 0
    return build(config=config)


def _shrunk_gemma(build: Any, ours: Pi05Config, config: Any) -> Any:
    config.vocab_size = ours.vocabulary
    return build(config=config)
