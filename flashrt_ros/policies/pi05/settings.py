"""From a policy's settings (YAML, node parameters) and its checkpoint to one configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ...contract.checks import unknown
from ..base import SettingsError
from .checkpoint import Checkpoint, checkpoint_folder
from .config import Pi05Config, coerced
from .lerobot import read_lerobot
from .openpi import is_openpi, read_openpi
from .presets import PRESETS, SEEDED_PRESETS
from .seeded import missing_checkpoint

_KINDS = {field.name: str(field.type) for field in fields(Pi05Config)}


@dataclass(frozen=True)
class Resolved:
    """A configuration, and the checkpoint that it belongs to (None: the preset's seeded weights)."""

    config: Pi05Config
    checkpoint: Checkpoint | None


def resolve(settings: Mapping[str, object]) -> Resolved:
    """Merge preset, checkpoint and settings, in this order; later ones win where the checkpoint leaves it open.

    Raises:
        SettingsError: an unknown key (with the nearest known one), a wrong type or range, or a setting that
            contradicts the checkpoint.
        CheckpointError: the checkpoint folder is missing or unreadable.
    """
    for name in settings:
        if name not in _KINDS:
            raise SettingsError(f"policy 'pi05': {unknown('setting', str(name), _KINDS)}")
    given = {name: coerced(name, _KINDS[name], value) for name, value in settings.items()}
    preset = given.get("preset", "pi05")  # the true size: seeded weights run only where their preset is named
    if preset not in PRESETS:
        raise SettingsError(f"policy 'pi05': {unknown('preset', preset, PRESETS)}")
    values = {**PRESETS[preset], **given}
    if not given.get("checkpoint"):
        if preset not in SEEDED_PRESETS:
            raise SettingsError(missing_checkpoint(preset))
        return Resolved(Pi05Config(**values), None)
    checkpoint = _read(given["checkpoint"])
    return Resolved(Pi05Config(**_merged(dict(PRESETS[preset]), checkpoint, given)), checkpoint)


def _read(path: str) -> Checkpoint:
    folder = checkpoint_folder(path)
    return read_openpi(folder) if is_openpi(folder) else read_lerobot(folder)


def _merged(preset: dict[str, Any], checkpoint: Checkpoint, given: Mapping[str, Any]) -> dict[str, Any]:
    _require_decided(checkpoint, given)
    values = {**preset, **checkpoint.suggested, **given}
    for name, value in checkpoint.fixed.items():
        expected = coerced(name, _KINDS[name], value)
        if name in given and given[name] != expected:
            raise SettingsError(
                f"setting '{name}' is {given[name]!r}, but checkpoint '{checkpoint.folder}' was trained with "
                f"{expected!r}; remove the setting"
            )
        values[name] = expected
    values["prompt_buckets"] = _buckets(preset, checkpoint, given)
    _settle_views(values, checkpoint, given)
    _settle_actions(values, checkpoint, given)
    _check_state_width(values, checkpoint)
    return values


def _require_decided(checkpoint: Checkpoint, given: Mapping[str, Any]) -> None:
    for name in checkpoint.undecided:
        if name not in given:
            raise SettingsError(f"checkpoint '{checkpoint.folder}' does not record '{name}'; set it as in training")


def _buckets(preset: Mapping[str, Any], checkpoint: Checkpoint, given: Mapping[str, Any]) -> tuple[int, ...]:
    longest = checkpoint.longest_prompt
    if "prompt_buckets" in given:
        buckets: tuple[int, ...] = given["prompt_buckets"]
        if buckets and max(buckets) > longest:
            raise SettingsError(
                f"setting 'prompt_buckets' reaches {max(buckets)} tokens, but checkpoint '{checkpoint.folder}' was "
                f"trained with at most {longest}"
            )
        return buckets
    defaults = preset.get("prompt_buckets", Pi05Config.prompt_buckets)
    return (*(bucket for bucket in defaults if bucket < longest), longest)


def _settle_views(values: dict[str, Any], checkpoint: Checkpoint, given: Mapping[str, Any]) -> None:
    known = checkpoint.views
    if not known:
        return
    chosen = given.get("views", known)
    if tuple(view for view in known if view in chosen) != tuple(chosen):
        raise SettingsError(
            f"setting 'views' is {list(chosen)}, expected some of {list(known)} in this order, as checkpoint "
            f"'{checkpoint.folder}' was trained"
        )
    values["views"] = chosen


def _settle_actions(values: dict[str, Any], checkpoint: Checkpoint, given: Mapping[str, Any]) -> None:
    recorded = checkpoint.recorded_actions
    if recorded:
        chosen = given.get("action_names", recorded)
        foreign = [name for name in chosen if name not in recorded]
        if foreign:
            raise SettingsError(f"policy 'pi05': {unknown('action', foreign[0], recorded)}, by checkpoint")
        values["action_names"] = chosen
        values["action_columns"] = tuple(recorded.index(name) for name in chosen)
        absolute = checkpoint.absolute_actions() if values.get("relative_actions") else ()
        values["absolute_actions"] = tuple(name for name in absolute if name in chosen)
        return
    width, names = checkpoint.action_width, values.get("action_names", ())
    if width is not None and len(names) != width:
        raise SettingsError(
            f"setting 'action_names' has {len(names)} names, but checkpoint '{checkpoint.folder}' has {width} actions "
            "and does not name them; list all in its order"
        )


def _check_state_width(values: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    width, names = checkpoint.state_width, values.get("state_names", ())
    if width is not None and len(names) != width:
        raise SettingsError(
            f"setting 'state_names' has {len(names)} names, but checkpoint '{checkpoint.folder}' has {width} states; "
            "list all in its order"
        )


def tokenizer_path(resolved: Resolved, preset_tokenizer: Path | None) -> Path:
    """The tokenizer's model file: the setting, the checkpoint's own, or the preset's; SettingsError without any."""
    if resolved.config.tokenizer:
        return Path(resolved.config.tokenizer).expanduser()
    beside = resolved.checkpoint.folder / "tokenizer.model" if resolved.checkpoint else None
    if beside is not None and beside.is_file():
        return beside
    if preset_tokenizer is not None:
        return preset_tokenizer
    raise SettingsError(
        "setting 'tokenizer' is empty; set it to the path of PaliGemma's tokenizer.model (it comes with "
        "google/paligemma-3b-pt-224), or put that file into the checkpoint folder"
    )
