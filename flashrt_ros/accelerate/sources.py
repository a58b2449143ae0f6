"""Models for the command line: a LeRobot checkpoint, or a factory of the user's own."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from .errors import AccelerateError
from .patches import Call, Patch
from .values import cloned

# Policy type → where its pure computation is: what is around it keeps queues, which no graph can.
_INNER: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "pi05": ("model", "sample_actions"),
        "pi0": ("model", "sample_actions"),
        "smolvla": ("model", "sample_actions"),
        "act": ("model", "forward"),
        "diffusion": ("diffusion", "generate_actions"),
    }
)
_TOKENS, _MASK = "observation.language.tokens", "observation.language.attention_mask"
_WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Source:
    """A model and its complete call; `about` says which module and method that is."""

    model: nn.Module
    method: str
    examples: list[Any]
    about: str


def lerobot_policy(folder: Path, device: torch.device, count: int) -> Source:
    """The policy of a LeRobot checkpoint folder, with `count` random observations of its own features.

    Raises AccelerateError if LeRobot is missing, the folder is none of its checkpoints, or not every weight was loaded.
    """
    try:
        configs = importlib.import_module("lerobot.configs")
        factory = importlib.import_module("lerobot.policies.factory")
    except ImportError as error:
        raise AccelerateError(f"LeRobot cannot be imported ({error}); it needs Python 3.12 and lerobot 0.6.1") from None
    if not (folder / "config.json").is_file() or not (folder / _WEIGHTS).is_file():
        raise AccelerateError(f"'{folder}' is no LeRobot checkpoint: config.json and {_WEIGHTS} must be in it")
    config = configs.PreTrainedConfig.from_pretrained(folder)
    config.device = str(device)
    policy = factory.get_policy_class(config.type).from_pretrained(folder, config=config).to(device).eval()
    check_loaded(policy, folder / _WEIGHTS)
    path, method = _INNER.get(config.type, ("", "predict_action_chunk"))
    inner = policy.get_submodule(path)
    batches = [_observation(config, device, seed) for seed in range(count)]
    return Source(
        inner, method, _recorded(policy, inner, method, batches), f"{config.type}: {path or 'policy'}.{method}"
    )


def check_loaded(model: nn.Module, path: Path) -> None:
    """AccelerateError unless every parameter has its values from the file at `path`: LeRobot only prints a warning."""
    try:
        opened: Any = safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise AccelerateError(f"cannot read '{path}': {error}; copy the checkpoint again") from None
    stored = {name.removeprefix("model."): name for name in opened.keys()}  # noqa: SIM118 (not a mapping)
    known = set()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in parameters.items():
        short = name.removeprefix("model.")
        if short in stored and _equal(parameter, opened.get_tensor(stored[short])):
            known.add(parameter.data_ptr())
    missing = [name for name, parameter in parameters.items() if parameter.data_ptr() not in known]
    if missing:
        raise AccelerateError(
            f"{len(missing)} parameters are not those of '{path}', such as '{missing[0]}'; what would be measured is "
            "not this checkpoint"
        )


def _equal(parameter: Tensor, stored: Tensor) -> bool:
    return torch.equal(parameter.detach(), stored.to(parameter.device, parameter.dtype))


def _observation(config: Any, device: torch.device, seed: int) -> dict[str, Tensor]:
    """One random observation: images between 0 and 1, states N(0, 1), and a prompt where the policy has one."""
    generator = torch.Generator().manual_seed(seed)
    batch: dict[str, Tensor] = {}
    for name, feature in config.input_features.items():
        draw = torch.rand if "image" in name else torch.randn
        batch[name] = draw(1, *feature.shape, generator=generator).to(device)
    length = getattr(config, "tokenizer_max_length", None)
    if length:
        valid = torch.arange(length)[None] < length - seed
        tokens = torch.randint(3, 800, (1, length), generator=generator)
        batch |= {_TOKENS: (tokens * valid).to(device), _MASK: valid.to(device)}
    if config.type == "diffusion":
        batch = {name: value[:, None].expand(-1, config.n_obs_steps, *value.shape[1:]) for name, value in batch.items()}
    return batch


def _recorded(policy: Any, inner: nn.Module, method: str, batches: Sequence[dict[str, Tensor]]) -> list[Any]:
    """What the policy passes to its inner call for each observation."""
    found: list[Any] = []

    def make(original: Call) -> Call:
        def recording(*args: Any, **kwargs: Any) -> Any:
            found.append((cloned(args), cloned(kwargs)))
            return original(*args, **kwargs)

        return recording

    if inner is policy:
        return [((batch,), {}) for batch in batches]
    patch = Patch(inner, method, make)
    patch.apply()
    try:
        with torch.no_grad():
            for batch in batches:
                policy.predict_action_chunk(batch)
    finally:
        patch.remove()
    return found


def factory_model(name: str, device: torch.device) -> Source:
    """What `package:factory` makes: `factory(device)` returns (model, examples) or (model, examples, method)."""
    module, separator, attribute = name.partition(":")
    if not separator:
        raise AccelerateError(f"'{name}' must be package.module:factory")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` has it: the user's own modules are in the working directory
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever a user's module may raise
        raise AccelerateError(f"cannot import '{name}': {type(error).__name__}: {error}") from error
    try:
        made = factory(device)
    except Exception as error:
        raise AccelerateError(
            f"'{name}' was called with one argument, the device, and raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise AccelerateError(f"'{name}' must return (model, examples) or (model, examples, method), not {type(made)}")
    model, examples, method = (*made, "forward")[:3]
    if not isinstance(examples, list | tuple):
        raise AccelerateError(f"'{name}' must return its examples as a list of calls, not {type(examples)}")
    return Source(model, method, list(examples), f"{type(model).__name__}.{method}")
