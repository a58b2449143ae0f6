"""Tiers: which site is stored and computed in which format, as data that a user can replace."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..contract import WIDE, ContractError, SiteFormat
from .errors import PrecisionError, TierError
from .packed import check_format

_FOLDER = Path(__file__).parent / "tiers"
_RULE_KEYS = {"sites", "weight", "activation", "why"}


@dataclass(frozen=True)
class Fidelity:
    """How close a tier must stay to float32: smallest cosine of all actions together, and of one observation's."""

    cosine_global: float
    cosine_worst: float


@dataclass(frozen=True)
class Rule:
    """Formats of every site whose name matches `sites`, a pattern with `*`, `?` and `[...]`."""

    sites: str
    weight: str
    activation: str
    why: str


@dataclass(frozen=True)
class Tier:
    """A table of rules; the first one that matches a site decides."""

    name: str
    fidelity: Fidelity
    rules: tuple[Rule, ...]

    @property
    def wide(self) -> bool:
        """True if the tier is 16-bit throughout."""
        return all(rule.weight == WIDE for rule in self.rules)

    def formats(self, sites: Sequence[str]) -> tuple[SiteFormat, ...]:
        """The format of each of a policy's sites, in their order.

        Raises:
            TierError: a site that no rule matches, or a rule that decides none (a misspelt pattern).
        """
        used: set[Rule] = set()
        table: list[SiteFormat] = []
        for site in sites:
            rule = next((rule for rule in self.rules if fnmatchcase(site, rule.sites)), None)
            if rule is None:
                raise TierError(f"tier '{self.name}' has no rule for site '{site}'; add one, such as `sites: '*'`")
            used.add(rule)
            table.append(SiteFormat(site, rule.weight, rule.activation))
        for rule in self.rules:
            if rule not in used:
                close = difflib.get_close_matches(rule.sites, sites, n=1, cutoff=0.0)
                raise TierError(
                    f"tier '{self.name}': rule '{rule.sites}' decides no site; either an earlier rule takes all of its "
                    f"sites, or this policy has none, the nearest being '{close[0]}'"
                )
        return tuple(table)


def presets() -> tuple[str, ...]:
    """Names of the tiers that come with the package, widest first."""
    return tuple(sorted((path.stem for path in _FOLDER.glob("*.yaml")), key=lambda name: (-_bits(name), name)))


def _bits(name: str) -> int:
    return int(name.partition("-")[0])


def load_tier(name: str) -> Tier:
    """The preset called `name`, or the tier in the YAML file `name`.

    Raises:
        TierError: neither a preset nor a file, or a file that is not a tier; the message says where and what.
    """
    path = _FOLDER / f"{name}.yaml" if name in presets() else Path(name).expanduser()
    if path.suffix not in (".yaml", ".yml"):
        raise TierError(f"unknown precision '{name}'; expected one of {', '.join(presets())}, or a tier's YAML file")
    return _tier(_read(path), str(path))


def _read(path: Path) -> Any:
    import yaml

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TierError(f"cannot read tier '{path}': {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise TierError(f"tier '{path}' is not valid YAML: {error}") from None


def _tier(data: Any, where: str) -> Tier:
    _expect(data, {"tier", "fidelity", "rules"}, where)
    if not isinstance(data["tier"], str) or not data["tier"]:
        raise TierError(f"{where}: 'tier' is {data['tier']!r}, expected the tier's name")
    rules = data["rules"]
    if not isinstance(rules, list) or not rules:
        raise TierError(f"{where}: 'rules' must be a list of rules, the first that matches a site decides")
    return Tier(data["tier"], _fidelity(data["fidelity"], where), tuple(_rule(rule, where) for rule in rules))


def _fidelity(data: Any, where: str) -> Fidelity:
    _expect(data, {"cosine_global", "cosine_worst"}, f"{where}: 'fidelity'")
    for name, value in data.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
            raise TierError(f"{where}: fidelity '{name}' is {value!r}, expected a cosine above 0 and at most 1")
    return Fidelity(float(data["cosine_global"]), float(data["cosine_worst"]))


def _rule(data: Any, where: str) -> Rule:
    _expect(data, _RULE_KEYS, f"{where}: a rule")
    wrong = [name for name in sorted(_RULE_KEYS) if not isinstance(data[name], str) or not data[name].strip()]
    if wrong:
        raise TierError(f"{where}: '{wrong[0]}' of a rule is {data[wrong[0]]!r}, expected text (16-bit is text too)")
    rule = Rule(data["sites"], data["weight"], data["activation"], data["why"])
    try:
        check_format(SiteFormat("rule", rule.weight, rule.activation))
    except (PrecisionError, ContractError) as error:
        raise TierError(f"{where}: rule '{rule.sites}': {str(error).partition(': ')[2]}") from None
    return rule


def _expect(data: Any, keys: set[str], where: str) -> None:
    if not isinstance(data, Mapping) or set(data) != keys:
        found = ", ".join(map(str, data)) if isinstance(data, Mapping) else f"a {type(data).__name__}"
        raise TierError(f"{where}: expected the keys {', '.join(sorted(keys))}, found {found or 'none'}")
