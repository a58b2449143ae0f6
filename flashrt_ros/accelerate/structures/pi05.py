"""A whole π0.5, as LeRobot writes it, on our own stages: recognised by its tensors, gated like all others."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...contract import Identity, Variant
from ...engine import Arena, exact_float32
from ...engine.graphs import Executable, capture
from ...ops import OpTable, reference_ops
from ...ops.embed import ABSENT
from ...policies import PolicyError
from ...policies.pi05.config import Pi05Config
from ...policies.pi05.cuda_plan import choose_stages
from ...policies.pi05.layout import EMBEDDING, EXPERT, LANGUAGE, VISION, canonical_names
from ...policies.pi05.plan import build_contract, image_buffer
from ...policies.pi05.policy import pads
from ...policies.pi05.source import MemorySource
from ...policies.pi05.stages import Pi05Stages
from ...policies.pi05.weights import load_weights
from ..errors import Outside
from ..patches import Call
from ..structure import Match, Observation, Plain, Scene, Site, Unsuitable
from ..turns import Turns

_METHOD = "sample_actions"
_ARGUMENTS = ("images", "img_masks", "tokens", "masks", "noise", "num_steps")
_BUCKETS = (48, 96)  # shorter prompts than the longest that the model pads to


class Pi05Stage(Plain):
    """`sample_actions(images, img_masks, tokens, masks, noise=None, num_steps=None)` of one observation.

    Vision and norms, which LeRobot keeps in float32, are computed in the dtype of the language model; whether that is
    close enough is the parity gate's question.
    """

    name = "pi05_stages"
    kind = "policy"
    capturable = False  # it reads the prompt's length on the host, and has graphs of its own

    def methods(self, model: nn.Module) -> Iterable[Site]:
        """`sample_actions` of modules that have the arguments and the tensors of a π0.5."""
        for path, module in model.named_modules():
            if _looks_right(module):
                yield Site(path, module, _METHOD)

    def find(self, scene: Scene) -> Iterable[Match]:
        """Those that the examples called, directly or through a policy around them."""
        for site in self.methods(scene.model):
            seen = scene.seen.get(site)
            if seen is None or not seen.observations or scene.hooks_below(site):
                continue
            observations = tuple(seen.observations)

            def build(site: Site = site, observations: tuple[Observation, ...] = observations) -> Sequence[Call]:
                return (_call(site.module, observations, scene.device),)

            yield Match((site,), build, (site.module,), "π0.5: vision, prefix and expert as fused stages")


def _looks_right(module: nn.Module) -> bool:
    method = getattr(module, _METHOD, None)
    if method is None or not set(_ARGUMENTS) <= set(inspect.signature(method).parameters):
        return False
    names = canonical_names(name for name, _ in module.named_parameters())
    return {EMBEDDING, "action_in_proj.weight", f"{EXPERT}.layers.0.input_layernorm.dense.weight"} <= names.keys()


def _call(module: nn.Module, observations: Sequence[Observation], device: torch.device) -> Call:
    signature = inspect.signature(getattr(type(module), _METHOD))
    bound = [_bound(signature, module, observation.args, observation.kwargs) for observation in observations]
    views = {len(arguments["images"]) for arguments in bound}
    lengths = {int(arguments["tokens"].shape[1]) for arguments in bound}
    rows = {int(arguments["tokens"].shape[0]) for arguments in bound}
    if (len(views), len(lengths), rows) != (1, 1, {1}):
        raise Unsuitable("the examples differ in their number of images or padded tokens, or have more than one row")
    try:
        config = described(module, views.pop(), lengths.pop())
        source = MemorySource(dict(module.state_dict()), config, "the model")
    except (PolicyError, AttributeError, KeyError) as error:
        raise Unsuitable(f"its tensors are not those of a π0.5: {error}") from None
    return Pi05Call(module, config, source, device)


def _bound(
    signature: inspect.Signature, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments by name; those that the method only passes on are among them."""
    arguments = signature.bind(module, *args, **kwargs).arguments
    return {**arguments, **arguments.pop("kwargs", {})}


def described(module: nn.Module, views: int, tokens: int) -> Pi05Config:
    """The configuration of a live π0.5, read from its tensors and from the few numbers that no shape shows.

    Raises AttributeError, KeyError or SettingsError where it is none.
    """
    shapes = {name: tuple(module.state_dict()[stored].shape) for name, stored in _named(module).items()}
    settings: Any = module.config
    attention = _part(module, f"{LANGUAGE}.layers.0.self_attn")
    language = attention.config
    width, _, patch, _ = shapes[f"{VISION}.embeddings.patch_embedding.weight"]
    grid = round(shapes[f"{VISION}.embeddings.position_embedding.weight"][0] ** 0.5)
    head = int(attention.head_dim)
    return Pi05Config(
        dtype=str(attention.q_proj.weight.dtype).removeprefix("torch."),
        steps=int(settings.num_inference_steps),
        prompt_buckets=(*(bucket for bucket in _BUCKETS if bucket < tokens), tokens),
        max_pixels=3 * (grid * patch) ** 2,  # a window of four bytes a pixel then holds three planes of float32
        views=tuple(f"view{index}" for index in range(views)),
        action_names=tuple(f"action{index}" for index in range(shapes["action_in_proj.weight"][1])),
        chunk=int(settings.chunk_size),
        padded_width=shapes["action_in_proj.weight"][1],
        state_in_prompt=False,
        image_size=grid * patch,
        patch_size=patch,
        vision_width=width,
        vision_layers=_layers(shapes, VISION + ".encoder"),
        vision_heads=int(_part(module, f"{VISION}.encoder.layers.0.self_attn").num_heads),
        vision_hidden=shapes[f"{VISION}.encoder.layers.0.mlp.fc1.weight"][0],
        layers=_layers(shapes, LANGUAGE),
        query_heads=shapes[f"{LANGUAGE}.layers.0.self_attn.q_proj.weight"][0] // head,
        key_heads=shapes[f"{LANGUAGE}.layers.0.self_attn.k_proj.weight"][0] // head,
        head_dim=head,
        vocabulary=shapes[EMBEDDING][0],
        language_width=shapes[EMBEDDING][1],
        language_hidden=shapes[f"{LANGUAGE}.layers.0.mlp.up_proj.weight"][0],
        expert_width=shapes["action_in_proj.weight"][0],
        expert_hidden=shapes[f"{EXPERT}.layers.0.mlp.up_proj.weight"][0],
        eps=float(_part(module, f"{LANGUAGE}.layers.0.input_layernorm").eps),
        rope_theta=float(language.rope_parameters["rope_theta"]),
        min_period=float(settings.min_period),
        max_period=float(settings.max_period),
    )


def _named(module: nn.Module) -> dict[str, str]:
    return canonical_names(module.state_dict())


def _part(module: nn.Module, path: str) -> Any:
    return module.get_submodule(path)


def _layers(shapes: Mapping[str, tuple[int, ...]], stack: str) -> int:
    start = f"{stack}.layers."
    return 1 + max(int(name.removeprefix(start).split(".")[0]) for name in shapes if name.startswith(start))


class Pi05Call:
    """`sample_actions` of one module: windows are filled, one graph a prompt length is replayed, actions are copied.

    `notes` has the parts whose kernels were refused by their self-test, with the reason.
    """

    def __init__(self, module: nn.Module, config: Pi05Config, source: MemorySource, device: torch.device) -> None:
        self._module, self._config, self._device = module, config, device
        self._signature = inspect.signature(getattr(type(module), _METHOD))
        weights = load_weights(source, config, device, padded=pads(config, device))
        contract = build_contract(config, Identity(policy="pi05", weights="of the live module"))
        stages, reports = choose_stages(config, weights, reference_ops(), contract, device, overlap=config.overlap)
        self.notes = {f"{_METHOD}: {report.op}": report.reason for report in reports if report.reason}
        stages.replace_ops(float_images(reference_ops()))
        self._arena = Arena(contract, device)
        self._images = [self._planes(view) for view in config.views]
        self._turns = Turns(device)
        with torch.no_grad():
            with exact_float32():  # as the tables of the fused expert, which belong to these modulations
                stages.checkpoint(self._arena, contract.variants[0])
            self._graphs = {v.dims["prompt"]: self._captured(stages, v) for v in contract.variants}

    def _planes(self, view: str) -> Tensor:
        size = self._config.image_size
        return self._arena[image_buffer(view)].view(torch.float32)[: 3 * size * size].view(3, size, size)

    def _captured(self, stages: Pi05Stages, variant: Variant) -> Executable:
        def body(arena: Mapping[str, Tensor], variant: Variant) -> None:
            stages.prompt(arena, variant)
            stages.full(arena, variant)

        tokens = self._arena["tokens"].fill_(ABSENT)
        tokens[: variant.dims["prompt"]].fill_(0)  # no more than this graph has rows for
        return capture(body, self._arena, variant, self._device)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """float32[1, chunk, width]; Outside for values that only the original serves."""
        arguments = _bound(self._signature, self._module, args, kwargs)
        steps = arguments.pop("num_steps", None)
        noise = arguments.pop("noise", None)
        images, img_masks, tokens, masks = (arguments.pop(name) for name in _ARGUMENTS[:4])
        arguments.pop("self", None)
        self._refuse_other(steps, arguments)
        bucket = self._bucket(img_masks, masks)
        config = self._config
        if noise is None:
            noise = self._module.sample_noise((1, config.chunk, config.padded_width), tokens.device)  # type: ignore
        with self._turns, torch.no_grad():
            for window, image in zip(self._images, images, strict=True):
                window.copy_(image[0])
            self._arena["tokens"].copy_(torch.where(masks[0], tokens[0], ABSENT))
            self._arena["noise"].copy_(noise[0])
            self._graphs[bucket].replay()
            return self._arena["actions"][None].clone()

    def _refuse_other(self, steps: int | None, arguments: Mapping[str, Any]) -> None:
        if steps is not None and steps != self._config.steps:
            raise Outside(f"{steps} steps are asked for, {self._config.steps} are prepared")
        given = [name for name, value in arguments.items() if value is not None]
        if given or getattr(self._module, "rtc_processor", None) is not None:
            raise Outside(f"'{given[0] if given else 'rtc_processor'}' is given, which the stages do not know")

    def _bucket(self, img_masks: Sequence[Tensor], masks: Tensor) -> int:
        """The prepared prompt length; one small copy to the host, as which rows count is data."""
        row = masks[0]
        ordered = (row[:-1] >= row[1:]).all()
        facts = torch.stack((torch.cat(tuple(img_masks)).all() & ordered, row.sum())).tolist()
        if not facts[0] or not facts[1]:
            raise Outside("an image is masked out, or the valid tokens are not the first ones")
        return next(bucket for bucket in self._config.prompt_buckets if bucket >= facts[1])


def float_images(ops: OpTable) -> OpTable:
    """`ops` for windows that hold three float32 planes between -1 and 1 instead of a camera's bytes."""
    return replace(ops, pixels_to_patches=_planes_to_patches)


def _planes_to_patches(pixels: Tensor, pixel_format: Tensor, *, patch: int, out: Tensor) -> None:
    """Cut float32[3, size, size] into patch rows, in the order of the op; `out` may have longer rows."""
    grid = round(out.shape[0] ** 0.5)
    size = grid * patch
    planes = pixels.view(torch.float32)[: 3 * size * size].view(3, grid, patch, grid, patch)
    out[:, : 3 * patch * patch].copy_(planes.permute(1, 3, 0, 2, 4).reshape(grid * grid, -1))


STRUCTURES = (Pi05Stage(),)
