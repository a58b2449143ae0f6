"""What a structure is: something that can be recognised in a model that nobody prepared, and done faster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .patches import Call
from .values import Signature, opaque, signature, tensors

Facts = TypeVar("Facts")

KINDS = ("kernel", "packing", "precision", "graph", "policy", "compile")
"""kernel: another way to compute one module. packing: several products in one. precision: narrower numbers. graph: a
call captured once and replayed. policy: a whole known model. compile: `torch.compile`."""


@dataclass(frozen=True)
class Site:
    """A method of a module: `path` is its name in the model, empty for the model itself."""

    path: str
    module: nn.Module = field(compare=False, repr=False)
    method: str = "forward"

    @property
    def name(self) -> str:
        """`path.method`, without `forward`."""
        method = "" if self.method == "forward" else self.method
        return ".".join(filter(None, (self.path, method))) or "(the model)"


@dataclass(frozen=True)
class Observation:
    """One real call of a module: what went in and what came out. `args` and `result` are copies."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


@dataclass
class Seen:
    """What the examples did with one module: every signature with which it was called, and one call of each."""

    site: Site
    signatures: set[Signature] = field(default_factory=set)
    observations: list[Observation] = field(default_factory=list)
    calls: int = 0


@dataclass(frozen=True)
class Scene:
    """A model after its examples have run: what a structure looks at.

    Attributes:
        model, method: the complete call is `model.method(...)`.
        examples: (args, kwargs) of complete calls.
        seen: linear layers, and the modules and methods that a structure asked to observe.
        shared: groups of linear layers that were called one after the other on the very same tensor.
        hooked: paths of modules with forward hooks; what replaces a module above them would skip the hooks.
        side_effects: Python attributes that a complete call changes; empty if none was found.
    """

    model: nn.Module
    method: str
    examples: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...]
    seen: dict[Site, Seen]
    shared: tuple[tuple[Site, ...], ...]
    hooked: frozenset[str]
    side_effects: str
    device: torch.device

    @property
    def root(self) -> Site:
        """The complete call."""
        return Site("", self.model, self.method)

    def signatures(self, site: Site) -> frozenset[Signature]:
        """What the examples passed to `site`."""
        if site == self.root:
            return frozenset(signature(args, kwargs) for args, kwargs in self.examples)
        return frozenset(self.seen[site].signatures)

    def forget(self) -> None:
        """Let the copies of inputs and outputs go; matches that were found stay valid."""
        for seen in self.seen.values():
            seen.observations.clear()

    def hooks_below(self, site: Site) -> bool:
        """Whether something inside `site` has forward hooks, which a replacement would skip."""
        return any(below(path, site.path) and path != site.path for path in self.hooked)


@dataclass(frozen=True)
class Match:
    """A place where a structure fits.

    Attributes:
        sites: the methods that it replaces, together or not at all.
        build: makes their replacements, in order; may raise, which refuses the match with the error's first line.
        weights: modules whose weights the replacements are made from.
        detail: what was recognised, for the receipt.
    """

    sites: tuple[Site, ...]
    build: Callable[[], Sequence[Call]]
    weights: tuple[nn.Module, ...] = ()
    detail: str = ""


class Structure(Protocol):
    """One matcher and one kernel (and, for `ModuleStructure`, one reference).

    Attributes:
        name: unique; it is what receipts and tables say.
        kind: one of `KINDS`.
        per_set: `build` depends on what else is active, so it runs anew for each set (graphs).
        capturable: the replacement can be part of a captured call.
    """

    name: str
    kind: str
    per_set: bool
    capturable: bool

    def available(self, device: torch.device) -> str:
        """Why this structure has nothing to offer on `device`; empty if it has."""

    def watches(self, module: nn.Module) -> bool:
        """Whether calls of `module` should be observed; decided on its parameters and children alone."""

    def methods(self, model: nn.Module) -> Iterable[Site]:
        """Methods other than `forward` whose calls should be observed."""

    def find(self, scene: Scene) -> Iterable[Match]:
        """Every place where the structure fits."""


class Plain:
    """What most structures answer: available everywhere, nothing to observe."""

    name = ""
    kind = "kernel"
    per_set = False
    capturable = True

    def available(self, device: torch.device) -> str:
        """Everywhere."""
        return ""

    def watches(self, module: nn.Module) -> bool:
        """Nothing."""
        return False

    def methods(self, model: nn.Module) -> Iterable[Site]:
        """None."""
        return ()


class ModuleStructure(Plain, Generic[Facts]):
    """A structure that stands for one kind of module. Three methods make one: hypotheses, reference, kernel.

    A module fits if the reference of one of its hypotheses gives, on the inputs that the examples sent through it, what
    the module gave. So a class of any name is recognised, and one that only looks alike is not.
    """

    tolerance = 4.0  # largest relative error of the reference, in roundings of the result's dtype
    site_error = 0.05  # largest relative error of the kernel at its site: the complete call may hide a larger one

    def watches(self, module: nn.Module) -> bool:
        """Modules with at least one hypothesis."""
        return next(iter(self.hypotheses(module)), None) is not None

    def hypotheses(self, module: nn.Module) -> Iterable[Facts]:
        """What `module` may be, judged by its parameters and children; most modules: nothing."""
        raise NotImplementedError

    def reference(self, facts: Facts, *args: Any, **kwargs: Any) -> Any:
        """The definition, in PyTorch, of what a module with `facts` computes."""
        raise NotImplementedError

    def kernel(self, facts: Facts, observation: Observation) -> Call:
        """The faster way, perhaps with weights prepared; raises `Unsuitable` for inputs that it cannot serve."""
        raise NotImplementedError

    def find(self, scene: Scene) -> Iterable[Match]:
        """Modules whose observed calls one of their hypotheses explains."""
        for seen in scene.seen.values():
            if not seen.observations or scene.hooks_below(seen.site):
                continue
            facts = self._explanation(seen)
            if facts is not None:
                yield self._match(seen, facts)

    def _explanation(self, seen: Seen) -> Facts | None:
        for facts in self.hypotheses(seen.site.module):
            if all(self._explains(facts, observation) for observation in seen.observations):
                return facts
        return None

    def _explains(self, facts: Facts, observation: Observation) -> bool:
        if opaque((observation.args, observation.kwargs)):
            return False
        try:
            result = self.reference(facts, *observation.args, **observation.kwargs)
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
            return False  # the call's arguments are not those of this structure
        return agree(result, observation.result, self.tolerance)

    def _match(self, seen: Seen, facts: Facts) -> Match:
        observation = seen.observations[0]

        def build() -> Sequence[Call]:
            call = self.kernel(facts, observation)
            _try_out(call, observation, self.site_error)
            return (call,)

        return Match((seen.site,), build, (seen.site.module,), type(seen.site.module).__name__)


class Unsuitable(ValueError):  # noqa: N818
    """A kernel cannot serve these sizes, types or this device; the text says which it needs."""


def agree(result: Any, expected: Any, roundings: float) -> bool:
    """Whether two results are equal up to `roundings` roundings of their dtype (relative 2-norm), tensor by tensor."""
    if pytree.tree_structure(result) != pytree.tree_structure(expected):
        return False
    return all(_near(a, b, roundings) for a, b in zip(tensors(result), tensors(expected), strict=True))


def _near(a: Tensor, b: Tensor, roundings: float) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not b.is_floating_point():
        return torch.equal(a, b)
    distance, size = (a.double() - b.double()).norm(), b.double().norm()
    return bool(distance <= roundings * torch.finfo(b.dtype).eps * size)


def _try_out(call: Call, observation: Observation, most: float) -> None:
    """Run a kernel once on a real input. What cannot run, or is wrong already here, does not reach the gates.

    The gates look at the complete call, in which a site may count for little on these examples and for much on others.
    """
    with torch.inference_mode():
        result = call(*observation.args, **observation.kwargs)
    if pytree.tree_structure(result) != pytree.tree_structure(observation.result):
        raise Unsuitable("the kernel returns another arrangement of tensors than the module")
    for mine, theirs in zip(tensors(result), tensors(observation.result), strict=True):
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            found, wanted = (f"{t.dtype}{list(t.shape)}" for t in (mine, theirs))
            raise Unsuitable(f"the kernel returns {found}, the module {wanted}")
        error = float((mine.double() - theirs.double()).norm() / theirs.double().norm().clamp_min(1e-300))
        if not error <= most:  # NaN too
            raise Unsuitable(f"on the module's own input the kernel is {error:.2g} away from it, allowed is {most:g}")


def below(path: str, ancestor: str) -> bool:
    """Whether `path` is `ancestor` or inside it."""
    return not ancestor or path == ancestor or path.startswith(f"{ancestor}.")
