"""Running the examples through the untouched model and writing down what its modules did."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .calls import CompleteCall
from .patches import Call, Maker, Patch
from .structure import Observation, Scene, Seen, Site, Structure
from .values import cloned, nbytes, signature

_MOST_BYTES = 4 << 30  # of copied inputs and outputs; a module that comes later is not recognised


def observe(call: CompleteCall, structures: Sequence[Structure]) -> Scene:
    """Run every example once more under observation. The model is afterwards what it was."""
    hooked = frozenset(name for name, module in call.model.named_modules() if _has_hooks(module))
    before = _attributes(call.model)
    seen, order = _Notebook(structures), _Order()
    with _watched(call.model, seen, order):
        for index in range(len(call.examples)):
            call.seeded(index)
            order.next_example()
    return Scene(
        model=call.model,
        method=call.method,
        examples=call.examples,
        seen=seen.seen,
        shared=order.groups(),
        hooked=hooked,
        side_effects=_difference(before, _attributes(call.model)),
        device=call.device,
    )


class _Notebook:
    """Signatures of all calls of watched modules, and copies of the first call of each signature."""

    def __init__(self, structures: Sequence[Structure]) -> None:
        self.seen: dict[Site, Seen] = {}
        self._structures = structures
        self._left = _MOST_BYTES

    def wants(self, module: nn.Module) -> bool:
        return any(structure.watches(module) for structure in self._structures)

    def methods(self, model: nn.Module) -> list[Site]:
        """Methods other than `forward` that a structure asked for."""
        return list(dict.fromkeys(site for structure in self._structures for site in structure.methods(model)))

    def note_method(self, site: Site, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """A method that a structure asked for, which ends after all that it calls: what they left does not limit it."""
        left, self._left = self._left, _MOST_BYTES
        self.note(site, args, kwargs, result, copied=True)
        self._left = left

    def note(self, site: Site, args: Any, kwargs: dict[str, Any], result: Any, *, copied: bool) -> None:
        """Linear layers are noted too, without copies: what packs them needs their signatures only."""
        seen = self.seen.setdefault(site, Seen(site))
        seen.calls += 1
        key = signature(args, kwargs)
        if key in seen.signatures:
            return
        seen.signatures.add(key)
        if not copied:
            return
        self._left -= nbytes((args, kwargs, result))
        if self._left > 0:
            seen.observations.append(Observation(cloned(args), cloned(kwargs), cloned(result)))


class _Order:
    """Which linear layers are called one after the other on the very same tensor."""

    def __init__(self) -> None:
        self._rows: list[list[Site]] = []
        self._last: tuple[Tensor, int] | None = None

    def note(self, site: Site, x: Tensor) -> None:
        version = 0 if x.is_inference() else x._version
        if self._last is None or self._last[0] is not x or self._last[1] != version:
            self._rows.append([])
        self._last = (x, version)
        self._rows[-1].append(site)

    def next_example(self) -> None:
        self._last = None

    def groups(self) -> tuple[tuple[Site, ...], ...]:
        """Rows of at least two different layers that always come together."""
        rows = {tuple(site.path for site in row): tuple(row) for row in self._rows}
        uses: dict[str, int] = {}
        for paths in rows:
            for path in set(paths):
                uses[path] = uses.get(path, 0) + 1
        alone = [row for paths, row in rows.items() if len(set(paths)) == len(paths) > 1]
        return tuple(row for row in alone if all(uses[site.path] == 1 for site in row))


@contextmanager
def _watched(model: nn.Module, notebook: _Notebook, order: _Order) -> Iterator[None]:
    methods = [Patch(site.module, site.method, _noting(site, notebook)) for site in notebook.methods(model)]
    handles = [
        module.register_forward_hook(_hook(path, notebook, order), with_kwargs=True)
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) or notebook.wants(module)
    ]
    for patch in methods:
        patch.apply()
    try:
        yield
    finally:
        for patch in reversed(methods):
            patch.remove()
        for handle in handles:
            handle.remove()


def _hook(path: str, notebook: _Notebook, order: _Order) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if isinstance(module, nn.Linear) and args and isinstance(args[0], Tensor):
            order.note(Site(path, module), args[0])
        notebook.note(Site(path, module), args, kwargs, result, copied=notebook.wants(module))

    return hook


def _noting(site: Site, notebook: _Notebook) -> Maker:
    def make(original: Call) -> Call:
        def noting(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            notebook.note_method(site, args, kwargs, result)
            return result

        return noting

    return make


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


_TORCHS_OWN = frozenset(vars(nn.Module())) - {"training"}
_Attributes = dict[tuple[str, str], object]


def _attributes(model: nn.Module) -> _Attributes:
    """Python attributes of every module, one level deep: what a replayed graph would not update."""
    return {
        (path, name): _print(value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in _TORCHS_OWN
    }


def _print(value: object) -> object:
    if isinstance(value, Tensor):
        return (id(value), value._version if not value.is_inference() else 0)
    if isinstance(value, dict):
        return tuple((key, id(item), _length(item)) for key, item in value.items())
    if isinstance(value, list | tuple | set) or hasattr(value, "maxlen"):
        return tuple(id(item) for item in value)  # type: ignore[attr-defined]
    return value if isinstance(value, int | float | str | bool | torch.dtype) else id(value)


def _length(value: object) -> int:
    return len(value) if hasattr(value, "__len__") and not isinstance(value, Tensor) else 0


def _difference(before: _Attributes, after: _Attributes) -> str:
    changed = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    return ", ".join(".".join(filter(None, key)) for key in sorted(changed)[:3])
