"""Pairwise cover: few rows of a product of choices in which every pair of choices meets at least once."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations, product

Row = dict[str, Hashable]


def full_product(factors: Mapping[str, Sequence[Hashable]]) -> list[Row]:
    return [dict(zip(factors, values, strict=True)) for values in product(*factors.values())]


def pairwise(factors: Mapping[str, Sequence[Hashable]]) -> list[Row]:
    """Greedy and deterministic: each row starts from an uncovered pair and takes, factor by factor, what covers most."""
    open_pairs = {
        ((a, x), (b, y)): None for a, b in combinations(factors, 2) for x in factors[a] for y in factors[b]
    }
    rows: list[Row] = []
    while open_pairs:
        row: Row = dict(next(iter(open_pairs)))
        for name, choices in factors.items():
            if name not in row:
                row[name] = max(
                    choices,
                    key=lambda c: sum(pair in open_pairs for pair in _pairs({**row, name: c}, factors)),
                )
        for pair in _pairs(row, factors):
            open_pairs.pop(pair, None)
        rows.append({name: row[name] for name in factors})
    return rows


def label(row: Row) -> str:
    return "-".join(str(value).replace("torch.", "") for value in row.values())


def _pairs(row: Row, factors: Mapping[str, Sequence[Hashable]]) -> list[tuple]:
    named = [(name, row[name]) for name in factors if name in row]
    return list(combinations(named, 2))
