"""One report for every source: rows that say what they are, a table, and a plain dictionary for JSON.

Each row says where its number comes from: `measured` on a device, `modelled` from the compiled code, or
`published` by others. Rows of different sources never meet in one line, and a factor is taken between two
rows of one source only.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

SCHEMA = 1
SOURCES = ("measured", "modelled", "published")


@dataclass(frozen=True)
class Row:
    """One number. `how`: the tool or model behind it; `low`, `high`: 20th and 80th percentile of a
    measurement, the range of a model; None where there is none. `link`: of a published number.
    """

    quantity: str
    value: float
    unit: str
    source: str
    how: str
    low: float | None = None
    high: float | None = None
    link: str = ""
    variant: str = ""

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise ValueError(f"source: expected one of {', '.join(SOURCES)}, got {self.source!r}")

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Rows with one key differ in their variant only."""
        return self.quantity, self.unit, self.source, self.how


@dataclass(frozen=True)
class Factor:
    """How many times less of a quantity the variant `after` has than `before`; None where it has nothing.

    low, high: the range when both have one, its ends taken against each other.
    """

    quantity: str
    before: str
    after: str
    factor: float | None
    low: float | None
    high: float | None
    unit: str
    source: str
    how: str


@dataclass
class Report:
    """A kernel, its variants in order, and everything known of them."""

    kernel: str
    sizes: str
    dtype: str
    variants: list[str]
    rows: list[Row]
    notes: list[str] = field(default_factory=list)
    provenance: dict[str, str] = field(default_factory=dict)

    def lines(self) -> dict[tuple, dict[str, Row]]:
        """{key of the rows: {variant: row}}, in order of appearance."""
        lines: dict[tuple, dict[str, Row]] = {}
        for row in self.rows:
            lines.setdefault(row.key, {})[row.variant] = row
        return lines

    def factors(self) -> list[Factor]:
        """The first variant over each other one, for every quantity that both have."""
        first, *others = self.variants
        return [
            _factor(found[first], found[other])
            for found in self.lines().values()
            for other in others
            if first in found and other in found
        ]

    def to_dict(self) -> dict:
        """Plain values: schema, kernel, sizes, dtype, variants, rows, factors, notes, provenance."""
        plain = {name: getattr(self, name) for name in ("kernel", "sizes", "dtype", "variants")}
        return {
            "schema": SCHEMA, **plain, "rows": [asdict(row) for row in self.rows],
            "factors": [asdict(each) for each in self.factors()], "notes": self.notes,
            "provenance": self.provenance,
        }  # fmt: skip

    def __str__(self) -> str:
        title = f"{self.kernel}, {self.sizes}, {self.dtype}"
        links = dict.fromkeys(f"{row.how}: {row.link}" for row in self.rows if row.link)
        notes = [f"note: {text}" for text in self.notes]
        return "\n".join([title, align(self.table()), *links, *notes])

    def table(self) -> list[list[str]]:
        """Cells: quantity, unit, one column a variant, the first over each other, source, how."""
        others = self.variants[1:]
        factors = {(f.quantity, f.unit, f.source, f.how, f.after): f for f in self.factors()}
        heads = ["factor"] if len(others) == 1 else [f"factor {name}" for name in others]
        cells = [["quantity", "unit", *self.variants, *heads, "source", "how"]]
        for key, found in self.lines().items():
            quantity, unit, source, how = key
            values = [_cell(found.get(name)) for name in self.variants]
            ratios = [_ratio(factors.get((*key, name))) for name in others]
            cells.append([quantity, unit, *values, *ratios, source, how])
        return cells


def align(cells: list[list[str]]) -> str:
    """Columns of one width each; numbers to the right would hide their ranges, so all stand left."""
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )


def _factor(before: Row, after: Row) -> Factor:
    ends = None not in (before.low, before.high, after.low, after.high)
    return Factor(
        before.quantity, before.variant, after.variant, _over(before.value, after.value),
        _over(before.low, after.high) if ends else None, _over(before.high, after.low) if ends else None,
        before.unit, before.source, before.how,
    )  # fmt: skip


def _over(a: float, b: float) -> float | None:
    return a / b if b else None


def _cell(row: Row | None) -> str:
    if row is None:
        return "-"
    if row.low is None or (row.low == row.high == row.value):
        return number(row.value)
    return f"{number(row.value)} [{number(row.low)}, {number(row.high)}]"


def _ratio(factor: Factor | None) -> str:
    return "-" if factor is None or factor.factor is None else f"{factor.factor:.3g}x"


def number(value: float) -> str:
    """Four digits; whole numbers whole."""
    return f"{value:.0f}" if float(value).is_integer() and abs(value) < 1e9 else f"{value:.4g}"
