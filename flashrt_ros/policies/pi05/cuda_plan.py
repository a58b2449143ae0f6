"""Chooses between the fused stages and the references, part by part, and says why."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ...contract import Contract, Variant
from ...engine import Arena, StageBody, exact_float32
from ...ops import OpTable, padding
from ...ops.cuda.compiler import KernelSource, full_text
from ...ops.cuda.errors import KernelError
from ...ops.cuda.expert import MAX_KEYS, MAX_ROWS
from ...ops.cuda.expert_packing import ACTIONS, HEAD_DIM, HEADS, HIDDEN, WIDTH
from ...ops.report import KernelReport
from ...ops.shapes import ShapeError
from . import cuda_products
from .config import Pi05Config
from .cuda_tiers import FUSED, STEPS, TierStages
from .plan import image_buffer
from .stages import Pi05Stages
from .weights import Pi05Weights

PARTS = {"vision": "prefix_residual", "prefix": "key_value", "expert": "actions"}  # part → the buffer that it leaves
LARGEST_DISTANCE = 0.1  # relative; two correct bfloat16 pipelines of this depth lie 0.02 apart, a wrong one above 0.5
LARGEST_OF_CODES = 0.3
"""The same in a tier: where values are rounded to codes, the last bit of a bfloat16 grows to 0.04 in 27 layers (seeded
weights: 0.11 in four), nearly as much as the codes themselves cost. Whether a tier is good enough is for its gate."""
_OLDEST = (9, 0)  # compute capability: bulk copies, programmatic launch, register hand-over
_SEED = 20


class ChosenStages(TierStages):
    """Fused stages of which some parts have been refused and run as references."""

    refused: frozenset[str] = frozenset()

    def vision(self, arena: Mapping[str, Tensor], variant: Variant) -> None:
        """Pixels → the image rows of the prefix."""
        (Pi05Stages if "vision" in self.refused else TierStages).vision(self, arena, variant)

    def prefix(self, arena: Mapping[str, Tensor], variant: Variant) -> None:
        """Image rows and prompt rows → keys and values of every layer."""
        (Pi05Stages if "prefix" in self.refused else TierStages).prefix(self, arena, variant)

    def action(self, arena: Mapping[str, Tensor], variant: Variant) -> None:
        """Noise → actions."""
        (Pi05Stages if "expert" in self.refused else TierStages).action(self, arena, variant)


def choose_stages(
    config: Pi05Config,
    weights: Pi05Weights,
    ops: OpTable,
    contract: Contract,
    device: torch.device,
    *,
    persistent: bool = True,
    overlap: bool = False,
    fused_gate_up: bool = True,
    fused_attention: bool = True,
) -> tuple[Pi05Stages, tuple[KernelReport, ...]]:
    """Stages for `device`, and a report on each part, on the prefix's product of gate and up, on both attentions, and
    on each kind of product in the parts of which some sites are narrow.

    A GPU that can run the fused parts runs each one that agrees with its reference on random inputs, with the weights
    as they are. Everything else runs the references; the report has the reason. On a CPU nothing faster exists, so
    nothing is refused.
    """
    reference = Pi05Stages(config, weights, ops)
    if device.type == "cpu":
        return reference, tuple(KernelReport(part) for part in PARTS)
    reason = unsuited(config, torch.cuda.get_device_capability(device))
    if not reason:
        try:
            stages = ChosenStages(
                config, weights, ops, persistent=persistent, overlap=overlap, fused_gate_up=fused_gate_up,
                fused_attention=fused_attention,
            )  # fmt: skip
            reports = _probe(stages, reference, config, contract, device)
            stages.refused = frozenset(report.op for report in reports if report.op in PARTS and report.fallback)
            steps = (*stages.attentions.reports(), *stages.product_reports())
            return stages, (*reports, *(step for step in steps if step.op.split(".")[0] not in stages.refused))
        except KernelError as error:
            reason = str(error).splitlines()[0]
    return reference, tuple(KernelReport(part, reason=reason) for part in PARTS)


def kernel_identity(reports: tuple[KernelReport, ...], references: str) -> str:
    """Which parts are fused, by which sources, how their products are multiplied, and with what padding: what the
    contract's identity says of kernels.

    Equal text means equal bits on one architecture; overlap is not in it, as it never changes a bit.
    """
    fused = [report.op for report in reports if report.kernel == FUSED]
    if not fused:
        return references
    products = [f"{report.op} {report.kernel}\n" for report in reports if "." in report.op]
    products += [f"own {' '.join(sorted(cuda_products.OWN_WIDE))}\n", f"padding {padding.MULTIPLE}\n"]
    text = "".join((*(full_text(KernelSource(name)) for name in _SOURCES), *products))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"{references}; fused {','.join(fused)} {digest}"


_SOURCES = (
    "expert", "gemm", "image_attention", "image_attention_wgmma", "norms", "pixels", "prefix", "prefix_attention",
    "quantise",
)  # fmt: skip


def unsuited(config: Pi05Config, capability: tuple[int, int]) -> str:
    """Why the fused stages cannot serve `config` on a GPU of `capability`; empty if they can."""
    if capability < _OLDEST:
        oldest, found = (".".join(map(str, pair)) for pair in (_OLDEST, capability))
        return f"fused kernels need compute capability {oldest}, this GPU has {found}"
    if config.dtype != "bfloat16":
        return f"fused kernels compute in bfloat16, the policy is configured for {config.dtype}"
    for name, wanted in _SIZES.items():
        if getattr(config, name) != wanted:
            return f"fused kernels are written for {name} {wanted}, the policy has {getattr(config, name)}"
    if config.vision_width % 128 or config.language_hidden % 4096 or config.language_width != 2048:
        return (
            "fused kernels need vision_width in multiples of 128, language_hidden in multiples of 4096 and "
            f"language_width 2048, the policy has {config.vision_width}, {config.language_hidden} and "
            f"{config.language_width}"
        )
    if config.chunk > MAX_ROWS or config.prefix_rows + config.chunk > MAX_KEYS:
        return (
            f"the fused expert takes {MAX_ROWS} actions and {MAX_KEYS} keys, the policy has {config.chunk} and "
            f"{config.prefix_rows + config.chunk}"
        )
    return ""


_SIZES = {
    "expert_width": WIDTH,
    "expert_hidden": HIDDEN,
    "query_heads": HEADS,
    "key_heads": 1,
    "head_dim": HEAD_DIM,
    "padded_width": ACTIONS,
    "eps": 1e-6,
}


def _probe(
    fused: TierStages, reference: Pi05Stages, config: Pi05Config, contract: Contract, device: torch.device
) -> tuple[KernelReport, ...]:
    """Run each part both ways, from equal inputs, in an arena of its own that is freed afterwards."""
    arena = Arena(contract, device)
    variant = contract.variants[0]
    with torch.inference_mode(), torch.cuda.device(device):
        _fill(arena, config, variant.dims["prompt"])
        with exact_float32():  # as captures, and the tables of the fused expert
            reference.checkpoint(arena, variant)
        reference.prompt(arena, variant)

        narrow = {item.name.split(".")[0] for item in contract.formats}

        def compare(part: str) -> KernelReport:
            rows, allowed = _rows(part, config, variant), LARGEST_OF_CODES if part in narrow else LARGEST_DISTANCE
            return _compare(part, fused.parts()[part], reference.parts()[part], arena, variant, rows, allowed)

        vision = with_less(fused.optional_of_vision(), fused.leave_out, lambda: compare("vision"))
        entered = arena["prefix_residual"].clone()

        def prefix() -> KernelReport:
            arena["prefix_residual"].copy_(entered)
            return compare("prefix")

        found = vision, with_less(fused.optional_of_prefix(), fused.leave_out, prefix), compare("expert")
        refused = {report.op for report in found if report.fallback}
        return *found, *(step for step in fused.step_reports() if STEPS[step.op] not in refused)


def with_less(
    optional: tuple[str, ...], leave_out: Callable[[str, str], None], compare: Callable[[], KernelReport]
) -> KernelReport:
    """What `compare` says of a part with as little left out as makes it agree with its reference: nothing, one of its
    optional steps, or all of them. If that does not help either, what it said of the whole.

    Args:
        leave_out: is called with a step and the reason why it is left out; empty: it is not.
    """
    whole = compare()
    if not whole.fallback:
        return whole
    for left_out in (*((step,) for step in optional), *((optional,) if len(optional) > 1 else ())):
        for step in optional:
            leave_out(step, whole.reason if step in left_out else "")
        found = compare()
        if not found.fallback:
            return found
    return whole


def _fill(arena: Arena, config: Pi05Config, bucket: int) -> None:
    generator = torch.Generator().manual_seed(_SEED)
    height, width = _frame(config)
    for index, view in enumerate(config.views):
        pixels = torch.randint(0, 256, (height * width * 3,), generator=generator, dtype=torch.uint8)
        arena[image_buffer(view)][: pixels.numel()].copy_(pixels)
        arena["image_format"][index].copy_(torch.tensor([height, width, 3, 0], dtype=torch.int32))
    tokens = torch.randint(0, min(config.vocabulary, 1000), (bucket - 1,), generator=generator, dtype=torch.int32)
    arena["tokens"].fill_(-1)
    arena["tokens"][: bucket - 1].copy_(tokens)
    arena["noise"].copy_(torch.randn(arena["noise"].shape, generator=generator))


def _frame(config: Pi05Config) -> tuple[int, int]:
    """Height and width of the random camera image: letterboxed and shrunk where the windows are large enough."""
    size = config.image_size
    return (size * 3 // 2, size * 2) if size * size * 3 <= config.max_pixels else (size, size)


def _rows(part: str, config: Pi05Config, variant: Variant) -> int:
    """Rows of the part's buffer that mean something, along its second to last axis."""
    valid = config.image_rows + variant.dims["prompt"] - 1
    return {"vision": config.image_rows, "prefix": valid, "expert": config.chunk}[part]


def _compare(
    part: str, fused: StageBody, reference: StageBody, arena: Arena, variant: Variant, rows: int, allowed: float
) -> KernelReport:
    """The reference runs last, from the same inputs, so that the next part starts from what the reference made."""
    result = arena[PARTS[part]][..., :rows, :]
    entered = arena["prefix_residual"].clone()  # the one input that a part may change
    result.fill_(float("nan"))  # a part must write all of it
    try:
        fused(arena, variant)
        torch.cuda.synchronize()
    except (KernelError, ShapeError, RuntimeError) as error:
        arena["prefix_residual"].copy_(entered)
        reference(arena, variant)
        return KernelReport(part, reason=f"did not run: {str(error).splitlines()[0]}")
    got = result.double()
    arena["prefix_residual"].copy_(entered)
    reference(arena, variant)
    expected = result.double()
    distance = ((got - expected).norm() / expected.norm()).item()
    if not distance <= allowed:  # also catches NaN
        reason = f"self-test: {distance:.2g} away from the reference, allowed {allowed}"
        return KernelReport(part, reason=reason)
    return KernelReport(part, FUSED)
