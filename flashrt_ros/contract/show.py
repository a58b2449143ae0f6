"""A contract as text for people."""

from __future__ import annotations

from .buffers import Buffer
from .contract import Contract
from .formats import summary
from .graph import rate_of
from .regions import Region


def show(contract: Contract) -> str:
    """Identity, formats, stages in execution order, buffers by role and capsule regions, as aligned plain text."""
    parts = [
        [f"contract {contract.name}   fingerprint {contract.fingerprint}"],
        _identity(contract),
        _formats(contract),
        _stages(contract),
        _buffers(contract),
        _regions(contract),
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines) + "\n"


def table(rows: list[tuple[str, ...]], indent: str = "  ") -> list[str]:
    """Rows as lines with aligned columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    return [(indent + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True))).rstrip() for row in rows]


def human_bytes(count: int) -> str:
    """`count` in B, KiB, MiB or GiB."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def _identity(contract: Contract) -> list[str]:
    rows: list[tuple[str, ...]] = []
    for key, value in contract.identity.to_dict().items():
        rows.append((key, ", ".join(value) if isinstance(value, list) else str(value)))
    return ["identity", *table(rows)]


def _formats(contract: Contract) -> list[str]:
    if not contract.formats:
        return []
    rows: list[tuple[str, ...]] = [*summary(contract.formats)]
    return ["formats   weight, activation; every other site is 16-bit", *table(rows)]


def _stages(contract: Contract) -> list[str]:
    lines = [f"stages, in order   shapes: {', '.join(v.name for v in contract.variants)}"]
    for stage in contract.order:
        shapes = f"captured for {', '.join(stage.variants)}" if stage.variants else "captured once"
        lines.append(f"  {stage.name}   {stage.rate.name.lower()}, {shapes}" + (f"   {stage.doc}" if stage.doc else ""))
        lines.append(f"      reads   {', '.join(stage.reads) or 'nothing'}")
        lines.append(f"      writes  {', '.join(stage.writes)}")
        if stage.after:
            lines.append(f"      after   {', '.join(stage.after)}")
    return lines


def _buffers(contract: Contract) -> list[str]:
    rows = [_buffer_row(contract, buffer) for buffer in sorted(contract.buffers, key=lambda b: b.role.value)]
    total = human_bytes(sum(buffer.nbytes for buffer in contract.buffers))
    return [f"buffers   {len(rows)}, {total}", *table(rows)]


def _buffer_row(contract: Contract, buffer: Buffer) -> tuple[str, ...]:
    shape = "x".join(map(str, buffer.shape))
    rate = rate_of(buffer, contract.writers).name.lower()
    return (
        buffer.role.name,
        buffer.name,
        f"{buffer.dtype.value}[{shape}]",
        human_bytes(buffer.nbytes),
        rate,
        buffer.doc,
    )


def _regions(contract: Contract) -> list[str]:
    if not contract.regions:
        return []
    rows = [_region_row(contract, region) for region in contract.regions]
    return [
        f"capsule regions   {len(rows)}, at most {human_bytes(sum(r.nbytes for r in contract.regions))}",
        *table(rows),
    ]


def _region_row(contract: Contract, region: Region) -> tuple[str, ...]:
    live = "all bytes"
    if region.live is not None:
        live = (
            f"first '{region.live}' of {contract.extent(region.live).maximum} rows in each of {region.blocks} block(s)"
        )
    return (
        region.name,
        f"{region.buffer}[{region.offset}:{region.end}]",
        human_bytes(region.nbytes),
        live,
    )
