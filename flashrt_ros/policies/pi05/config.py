"""Configuration of π0.5: every size, name and choice, checked once."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

from ...contract import ContractError, DType
from ...contract.buffers import checked_name
from ..base import SettingsError

PLANS = ("split", "full")
DTYPES = {"float32": DType.FLOAT32, "bfloat16": DType.BFLOAT16}


@dataclass(frozen=True)
class Pi05Config:
    """One π0.5 model and how it runs. Each field is also the name of a setting.

    Raises SettingsError, naming field, value and remedy, when the values contradict each other.
    """

    preset: str = "pi05"
    checkpoint: str = ""  # folder with model.safetensors; empty: the preset's seeded weights, where it has any
    tokenizer: str = ""  # SentencePiece model file; empty: the checkpoint's tokenizer.model, or the preset's own
    asset: str = ""  # which statistics of an openpi checkpoint, where its assets folder has several

    # how it runs
    plan: str = "split"  # "split": context and action are two graphs; "full": one graph
    dtype: str = "bfloat16"
    precision: str = "16-bit"  # tier: 16-bit (everything in `dtype`), 8-bit, 4-bit, or a tier's YAML file
    calibration: str = ""  # file that `flashrt calibrate` made for this tier; a narrower tier does not start without
    unverified: bool = False  # run a tier that has not passed `flashrt verify --tier`; for measuring, not for a robot
    steps: int = 10  # Euler steps from noise to actions
    fused: bool = True  # on a GPU: run the parts whose kernels pass their self-test; false: PyTorch references only
    overlap: bool = True  # on a GPU: let a kernel begin while the one in front of it ends; never changes a bit
    prompt_buckets: tuple[int, ...] = (48, 96, 200)  # prompt lengths that are captured, in tokens, ascending
    max_pixels: int = 1920 * 1080  # largest height * width of a camera frame

    # what goes in and comes out
    views: tuple[str, ...] = ()  # cameras, in the order the model was trained with
    state_names: tuple[str, ...] = ()  # in the model's order
    action_names: tuple[str, ...] = ()  # in the order of the result
    action_columns: tuple[int, ...] = ()  # where each action is in the model's padded row; empty: in order
    action_dt: float = 0.02  # seconds between two actions
    chunk: int = 50  # actions in one chunk
    padded_width: int = 32  # width of the model's action row
    state_in_prompt: bool = True
    relative_actions: bool = False  # the model's actions are offsets from the state of the same name
    absolute_actions: tuple[str, ...] = ()  # actions that stay absolute although `relative_actions` is set

    # vision encoder
    image_size: int = 224
    patch_size: int = 14
    vision_width: int = 1152
    vision_layers: int = 27
    vision_heads: int = 16
    vision_hidden: int = 4304

    # prefix encoder and action expert; they share depth and heads
    layers: int = 18
    query_heads: int = 8
    key_heads: int = 1
    head_dim: int = 256
    vocabulary: int = 257152
    language_width: int = 2048
    language_hidden: int = 16384
    expert_width: int = 1024
    expert_hidden: int = 4096

    # constants of the architecture
    eps: float = 1e-6  # of every normalisation
    rope_theta: float = 10000.0
    min_period: float = 4e-3  # of the time embedding
    max_period: float = 4.0

    def __post_init__(self) -> None:
        _check_types(self)
        _check_sizes(self)
        _check_names(self)
        if not self.action_columns:
            object.__setattr__(self, "action_columns", tuple(range(len(self.action_names))))
        _check_columns(self)

    # -- derived sizes -------------------------------------------------------------------------------------------------

    @property
    def patches(self) -> int:
        """Patches, and so prefix rows, of one view."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def patch_values(self) -> int:
        """Values in one patch row."""
        return 3 * self.patch_size**2

    @property
    def image_rows(self) -> int:
        """Prefix rows of all views."""
        return self.patches * len(self.views)

    @property
    def prefix_rows(self) -> int:
        """Prefix rows at the largest prompt bucket."""
        return self.image_rows + self.prompt_buckets[-1]

    @property
    def query_width(self) -> int:
        """Width of all query heads."""
        return self.query_heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Width of all key (or value) heads."""
        return self.key_heads * self.head_dim

    @property
    def modulations(self) -> int:
        """Adaptive norms of the expert: two a layer and the last one."""
        return 2 * self.layers + 1


def _check_types(config: Pi05Config) -> None:
    for field in fields(config):
        object.__setattr__(config, field.name, coerced(field.name, str(field.type), getattr(config, field.name)))


def coerced(name: str, kind: str, value: Any) -> Any:
    """`value` as `kind` ("int", "float", "bool", "str", "tuple[str, ...]", "tuple[int, ...]"), or SettingsError.

    Nothing is parsed or rounded; an integer is accepted where a float is expected, and a list where a tuple is.
    """
    if kind.startswith("tuple["):
        item = kind[len("tuple[") :].split(",")[0]
        if isinstance(value, str) or not hasattr(value, "__iter__"):
            raise SettingsError(f"setting '{name}' is {value!r}, expected a list of {item}")
        return tuple(coerced(f"{name}[{i}]", item, entry) for i, entry in enumerate(value))
    if kind == "float" and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value).__name__ != kind:
        raise SettingsError(f"setting '{name}' is {value!r} ({type(value).__name__}), expected {kind}")
    return value


_POSITIVE = (
    "steps", "max_pixels", "chunk", "padded_width", "image_size", "patch_size", "vision_width", "vision_layers",
    "vision_heads", "vision_hidden", "query_heads", "key_heads", "head_dim", "vocabulary", "language_width",
    "language_hidden", "expert_width", "expert_hidden", "action_dt", "eps", "rope_theta", "min_period", "max_period",
)  # fmt: skip


def _check_sizes(config: Pi05Config) -> None:
    for name in _POSITIVE:
        _demand(getattr(config, name) > 0, name, getattr(config, name), "a value above 0")
    _demand(config.layers >= 2, "layers", config.layers, "at least 2")
    _one_of("plan", config.plan, PLANS)
    _one_of("dtype", config.dtype, tuple(DTYPES))
    buckets = config.prompt_buckets
    _demand(
        bool(buckets) and buckets[0] > 0 and all(a < b for a, b in pairwise(buckets)),
        "prompt_buckets", list(buckets), "one or more token counts above 0, ascending",
    )  # fmt: skip
    _divides(config, "image_size", "patch_size")
    _divides(config, "vision_width", "vision_heads")
    _divides(config, "query_heads", "key_heads")
    _demand(config.head_dim % 2 == 0, "head_dim", config.head_dim, "an even number (rotary halves)")
    _demand(config.expert_width % 2 == 0, "expert_width", config.expert_width, "an even number (sines and cosines)")


def _check_names(config: Pi05Config) -> None:
    for field in ("views", "state_names", "action_names"):
        names = getattr(config, field)
        repeated = sorted({name for name in names if names.count(name) > 1})
        _demand(not repeated, field, list(names), f"each name once, but '{''.join(repeated[:1])}' is repeated")
        _demand(all(names), field, list(names), "no empty name")
        if not names and not (field == "state_names" and not config.state_in_prompt and not config.relative_actions):
            raise SettingsError(f"setting '{field}' is empty; name them in the order of the checkpoint")
    for view in config.views:
        try:
            checked_name("view", f"image.{view}")
        except ContractError:
            raise SettingsError(f"setting 'views': {view!r} must be of a-z, 0-9, '_' and '.' only") from None
    for name in config.absolute_actions:
        _one_of("absolute_actions", name, config.action_names)
    relative = set(config.action_names) - set(config.absolute_actions) if config.relative_actions else set()
    for name in sorted(relative - set(config.state_names)):
        raise SettingsError(
            f"action '{name}' is relative, but state_names has no '{name}' to add it to "
            f"({', '.join(config.state_names)}); name it there or list it in absolute_actions"
        )


def _check_columns(config: Pi05Config) -> None:
    columns, count = config.action_columns, len(config.action_names)
    if len(columns) != count or len(set(columns)) != count:
        raise SettingsError(f"setting 'action_columns' is {list(columns)}, expected {count} different columns")
    if not all(0 <= column < config.padded_width for column in columns):
        raise SettingsError(
            f"{count} action_names use columns {list(columns)} of a row of {config.padded_width}; "
            "name fewer actions or correct padded_width"
        )


def _demand(holds: bool, name: str, value: object, expected: str) -> None:
    if not holds:
        raise SettingsError(f"setting '{name}' is {value!r}, expected {expected}")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    _demand(value in allowed, name, value, f"one of {', '.join(allowed)}")


def _divides(config: Pi05Config, whole: str, part: str) -> None:
    a, b = getattr(config, whole), getattr(config, part)
    _demand(a % b == 0, whole, a, f"a multiple of {part} ({b})")
