"""Gradient-boosted trees as plain arrays, summed over all rows at once without scikit-learn.

A tree is a sum of pieces that look at no more than eight decisions each: the eight answers are one byte, and
the byte picks the piece's value out of a table of 256. So a forest is, per row, one comparison for each
threshold that any tree uses, one byte and one table entry for each piece, and a sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twin.catalogue import F64, I64, ContractError

_KINDS: dict[str, type[np.generic]] = {
    "start": np.int32,  # [n_tree + 1] first node of each tree, and the end
    "feature": np.int32,  # [n_node] column that a split reads; -1 at a leaf
    "threshold": np.float64,  # [n_node] a split sends x <= threshold to the left
    "missing_left": np.bool_,  # [n_node] where a split sends NaN
    "left": np.int32,  # [n_node] child, counted from the tree's first node; -1 at a leaf
    "right": np.int32,
    "value": np.float64,  # [n_node] what a leaf adds
    "baseline": np.float64,  # [1]
    "n_feature": np.int32,  # [1]
}
KEYS = tuple(_KINDS)
_SPLIT_KEYS = ("feature", "missing_left", "threshold")
BITS = 8  # decisions per piece: one byte
BLOCK_ROWS = 2048  # source: estimate; fewer rows cost more calls, more rows leave the cache
GROUP_PIECES = 64  # source: estimate; as above
LANE_ROWS = 64  # rows are padded to whole cache lines of decisions
# source: measured; NumPy copies a row of under a third of its buffer before it compares it, four times slower
BUFFER_ITEMS = 64

Term = tuple[int, bool]  # (row of the table of decisions, the answer that is asked for)
Leaf = tuple[dict[int, bool], float]  # every decision on the way, and what the leaf adds


def pack_trees(model: Any) -> dict[str, NDArray[Any]]:
    """Return the arrays of a fitted scikit-learn HistGradientBoostingRegressor, under KEYS.

    Any loss with an identity link: squared, absolute, quantile. The model must have been fitted on an array.
    Its nodes are no public interface, so it is asked for its own predictions on their thresholds. Raises
    ContractError for splits by category, several trees per iteration, a link other than identity, or nodes
    that do not mean what they meant.
    """
    try:
        rounds, link = model._predictors, type(model._loss.link).__name__
        baseline = np.asarray(model._baseline_prediction, np.float64).ravel()
        n_feature = np.array([model.n_features_in_], np.int32)
    except AttributeError as error:
        raise ContractError(f"expected fitted histogram gradient boosting: {error}") from error
    if link != "IdentityLink":
        raise ContractError(f"expected a loss with an identity link, got {link}")
    if len(baseline) != 1 or any(len(trees) != 1 for trees in rounds):
        raise ContractError("expected one tree per iteration")
    trees = [trees[0].nodes for trees in rounds]
    nodes = np.concatenate(trees)
    split = nodes["is_leaf"] == 0
    if np.any(nodes["is_categorical"][split]):
        raise ContractError("expected splits by number, got a split by category")
    packed: dict[str, NDArray[Any]] = {
        "start": np.cumsum([0, *map(len, trees)]).astype(np.int32),
        "feature": np.where(split, nodes["feature_idx"], -1).astype(np.int32),
        "threshold": np.where(split, nodes["num_threshold"], 0.0),
        "missing_left": split & (nodes["missing_go_to_left"] != 0),
        "left": np.where(split, nodes["left"].astype(np.int64), -1).astype(np.int32),
        "right": np.where(split, nodes["right"].astype(np.int64), -1).astype(np.int32),
        "value": np.where(split, 0.0, nodes["value"]),
        "baseline": baseline,
        "n_feature": n_feature,
    }
    probes = _probes(packed)
    if not np.allclose(predict_trees(packed, probes), model.predict(probes), rtol=1e-9, atol=1e-9):
        raise ContractError("the model predicts other values than its nodes give")
    return packed


def _probes(packed: Mapping[str, NDArray[Any]]) -> F64:
    """Return rows on the splits' thresholds, in a fixed shuffle, and with gaps [n_probe, n_feature]."""
    n_feature, feature = int(packed["n_feature"][0]), packed["feature"]
    step = np.arange(256)
    probes = np.zeros((len(step), n_feature))
    for column in range(n_feature):
        known = np.unique(packed["threshold"][feature == column])
        choices = np.concatenate([known, [np.nan, 0.0]])
        probes[:, column] = choices[(step * (2 * column + 1) + step // 16) % len(choices)]
    return probes


def check_trees(packed: Mapping[str, NDArray[Any]]) -> None:
    """Check that these arrays are a sound forest: they may come from a damaged store. Raises
    ContractError."""
    for key, kind in _KINDS.items():
        if key not in packed:
            raise ContractError(f"trees: {key} is missing")
        found = packed[key]
        if not isinstance(found, np.ndarray) or found.dtype != kind or found.ndim != 1:
            raise ContractError(f"trees: {key}: expected {kind.__name__} [n]")
    start, feature = packed["start"].astype(np.int64), packed["feature"]
    n_node, n_feature = len(feature), packed["n_feature"]
    lengths = dict.fromkeys(("threshold", "missing_left", "left", "right", "value"), n_node)
    for key, length in (lengths | {"baseline": 1, "n_feature": 1}).items():
        if len(packed[key]) != length:
            raise ContractError(f"trees: {key}: expected {length} values, got {len(packed[key])}")
    if not len(start) or start[0] != 0 or start[-1] != n_node or np.any(np.diff(start) < 1):
        raise ContractError(f"trees: start: expected to rise from 0 to {n_node}")
    if n_feature[0] < 1 or np.any(feature < -1) or np.any(feature >= n_feature[0]):
        raise ContractError(f"trees: feature: expected -1..{n_feature[0] - 1}")
    if np.any(np.isnan(packed["threshold"])):
        raise ContractError("trees: threshold: expected no NaN")
    if not (np.all(np.isfinite(packed["value"])) and np.isfinite(packed["baseline"][0])):
        raise ContractError("trees: value, baseline: expected finite numbers")
    _check_children(start, feature >= 0, packed["left"], packed["right"])


def _check_children(start: I64, split: NDArray[np.bool_], left: NDArray[Any], right: NDArray[Any]) -> None:
    """Check that children come after their only parent, so that there are no cycles."""
    size = np.diff(start)
    first, end = np.repeat(start[:-1], size)[split], np.repeat(start[1:], size)[split]
    parent = np.flatnonzero(split)
    expected = np.ones(len(split), np.int64)
    expected[start[:-1]] = 0
    for name, child in (("left", left), ("right", right)):
        if np.any(child[~split] != -1):
            raise ContractError(f"trees: {name}: expected -1 at a leaf")
        node = first + child[split]
        if np.any(node <= parent) or np.any(node >= end):
            raise ContractError(f"trees: {name}: expected a later node of the same tree")
        expected -= np.bincount(node, minlength=len(split))
    if np.any(expected != 0):
        raise ContractError("trees: expected one parent for each node but a root")


@dataclass(frozen=True)
class _Decisions:
    """Every comparison of a grove, and every AND of answers above a deep subtree."""

    groups: tuple[tuple[int, bool, int, int], ...]  # (feature, NaN goes left, first, end)
    threshold: F64  # [n_compared, 1]
    guards: tuple[tuple[Term, ...], ...]

    @property
    def n(self) -> int:
        return len(self.threshold) + len(self.guards)

    def answer(self, columns: F64, out: NDArray[np.bool_]) -> None:
        """Fill out [n, n_row] from columns [n_feature, n_row].

        A comparison with NaN is false: "goes right" is asked where NaN goes left, and "goes left" elsewhere.
        """
        for feature, missing_left, first, end in self.groups:
            ask = np.greater if missing_left else np.less_equal
            ask(columns[feature], self.threshold[first:end], out=out[first:end])
        for row, terms in enumerate(self.guards, len(self.threshold)):
            out[row] = True
            for decision, wanted in terms:
                (np.logical_and if wanted else np.greater)(out[row], out[decision], out=out[row])


class _Scratch:
    """Buffer for one group of pieces over one block of rows, kept during a call."""

    def __init__(self, n_lane: int) -> None:
        self.bits = np.empty((BITS * GROUP_PIECES, n_lane), np.bool_)
        self.entry = np.empty((GROUP_PIECES, n_lane), np.int64)
        self.added = np.empty((GROUP_PIECES, n_lane))


@dataclass(frozen=True)
class _LinearPieces:
    """A group of pieces of one forest: the decisions in each piece's byte, and the value that each byte
    adds."""

    decisions: I64  # [BITS * n_piece] by bit, the highest first, then by piece
    table: F64  # [n_piece * 256]

    def add(self, answers: NDArray[np.bool_], total: F64, scratch: _Scratch) -> None:
        """Add the group's sum for each column of the answers to total [n_row].

        Adds element by element alone, so that a row's sum does not depend on the rows beside it.
        """
        n_piece = len(self.table) // 256
        taken, entry = scratch.bits[: len(self.decisions)], scratch.entry[:n_piece]
        added = scratch.added[:n_piece]
        # No index is out of range: "clip" only spares a copy that "raise" makes.
        np.take(answers, self.decisions, axis=0, out=taken, mode="clip")
        bits = taken.view(np.uint8).reshape(BITS, n_piece, -1)
        byte = bits[0]
        for bit in bits[1:]:
            np.add(byte, byte, out=byte)
            np.bitwise_or(byte, bit, out=byte)
        np.copyto(entry, byte)
        entry += np.arange(0, len(self.table), 256)[:, None]
        np.take(self.table, entry, out=added, mode="clip")
        while n_piece > 1:
            half = n_piece // 2
            added[:half] += added[n_piece - half : n_piece]
            n_piece -= half
        total += added[0]


_Sum = tuple[float, tuple[_LinearPieces, ...]]  # a forest: its baseline and its pieces


class Grove:
    """Forests over the same rows, with shared comparisons. Built by `unpack_grove`."""

    def __init__(self, n_feature: int, decisions: _Decisions, forests: Sequence[_Sum]) -> None:
        self.n_feature, self._decisions, self._forests = n_feature, decisions, tuple(forests)

    def predict(self, rows: F64) -> F64:
        """Return the prediction of each forest for each row of features: [n_row, n_feature] -> [n_forest,
        n_row].

        A row's result is the same, to the bit, in any batch. Fastest on rows in order="F".
        Raises ContractError for other shapes.
        """
        if rows.ndim != 2 or rows.dtype != np.float64 or rows.shape[1] != self.n_feature:
            raise ContractError(f"rows: expected [n_row, {self.n_feature}], got {rows.dtype} {rows.shape}")
        n_row = len(rows)
        out = np.empty((len(self._forests), n_row))
        n_block = max(1, -(-n_row // BLOCK_ROWS))
        n_lane = max(1, -(-n_row // (n_block * LANE_ROWS))) * LANE_ROWS
        columns = np.zeros((self.n_feature, n_lane))
        answers = np.empty((self._decisions.n, n_lane), np.bool_)
        total, scratch = np.empty(n_lane), _Scratch(n_lane)
        with np.errstate():  # puts the size of NumPy's buffer back
            np.setbufsize(BUFFER_ITEMS)
            for first in range(0, n_row, n_lane):
                block = rows[first : first + n_lane]
                columns[:, : len(block)] = block.T
                self._decisions.answer(columns, answers)
                for forest, (base, groups) in enumerate(self._forests):
                    total.fill(base)
                    for pieces in groups:
                        pieces.add(answers, total, scratch)
                    out[forest, first : first + len(block)] = total[: len(block)]
        return out


class Forest:
    """One fitted model, ready to predict. Built by `unpack_trees`."""

    def __init__(self, grove: Grove) -> None:
        self._grove = grove

    def predict(self, rows: F64) -> F64:
        """Return predictions as `Grove.predict`: [n_row, n_feature] -> [n_row]."""
        return np.ravel(self._grove.predict(rows))


def predict_trees(packed: Mapping[str, NDArray[Any]], rows: F64) -> F64:
    """Return predictions [n_row] of [n_row, n_feature]; unpacks each time, so keep a Forest for repeated
    use."""
    return unpack_trees(packed).predict(rows)


def unpack_trees(packed: Mapping[str, NDArray[Any]]) -> Forest:
    """Return the forest of these arrays. Raises ContractError as `check_trees`."""
    return Forest(unpack_grove([packed]))


def unpack_grove(forests: Sequence[Mapping[str, NDArray[Any]]]) -> Grove:
    """Return forests over the same features as one grove.

    Raises ContractError as `check_trees`, for no forest at all and for unequal numbers of features.
    """
    for packed in forests:
        check_trees(packed)
    n_feature = sorted({int(packed["n_feature"][0]) for packed in forests})
    if len(n_feature) != 1:
        raise ContractError(f"trees: expected forests over the same features, got {n_feature}")
    joined = [np.concatenate([packed[key] for packed in forests]) for key in _SPLIT_KEYS]
    groups, threshold, row = _compared(*joined)
    guards: list[tuple[Term, ...]] = []
    sums, n_done = [], 0
    for packed in forests:
        rows = row[n_done : n_done + len(packed["feature"])]
        n_done += len(rows)
        sums.append(_pieces(packed, rows, len(threshold), guards))
    return Grove(n_feature[0], _Decisions(groups, threshold, tuple(guards)), sums)


def _compared(
    feature: NDArray[Any], missing_left: NDArray[np.bool_], threshold: F64
) -> tuple[tuple[tuple[int, bool, int, int], ...], F64, I64]:
    """Return every comparison once: groups and thresholds of `_Decisions`, and each node's row there, or
    -1."""
    split = np.flatnonzero(feature >= 0)
    order = split[np.lexsort((threshold[split], feature[split], missing_left[split]))]
    side = np.stack([feature[order], missing_left[order]])
    new_side = np.any(np.diff(side, prepend=-2) != 0, axis=0)
    new = new_side.copy()
    new[1:] |= threshold[order][1:] != threshold[order][:-1]
    row = np.full(len(feature), -1)
    row[order] = np.cumsum(new) - 1
    first = row[order][new_side].tolist()
    end = [*first[1:], int(new.sum())]
    column, missing = side[:, new_side].tolist()
    # Not strict: without any group `end` still has one item.
    groups = tuple(zip(column, map(bool, missing), first, end, strict=False))
    return groups, threshold[order][new][:, None], row


def _pieces(
    packed: Mapping[str, NDArray[Any]], row: I64, n_compared: int, guards: list[tuple[Term, ...]]
) -> _Sum:
    """Return one forest's trees cut into pieces; deep subtrees add their guards to the list."""
    base = float(packed["baseline"][0])
    small: list[list[Leaf]] = []
    for first, end in zip(packed["start"][:-1].tolist(), packed["start"][1:].tolist(), strict=True):
        tree = [packed[key][first:end].tolist() for key in ("left", "right", "missing_left", "value")]
        if end - first == 1:
            base += tree[3][0]
            continue
        small += _cut(_leaves(tree, row[first:end].tolist(), n_compared, guards))
    merged = _merge(small)
    decisions = np.zeros((BITS, len(merged)), np.int64)
    table = np.zeros((len(merged), 256))
    rows: list[tuple[int, int, float]] = []  # of all leaves: the bits that matter, those set, the value
    for at, (used, leaves) in enumerate(merged):
        bit = {decision: 1 << (BITS - 1 - place) for place, decision in enumerate(used)}
        decisions[: len(used), at] = used
        rows += [(sum([bit[d] for d in p]), sum([bit[d] for d in p if p[d]]), v) for p, v in leaves]
    matter, wanted, values = np.array(rows).reshape(-1, 3).T[:, :, None]
    added = np.where((np.arange(256, dtype=np.uint8) & matter.astype(np.uint8)) == wanted, values, 0.0)
    for at, (_, leaves) in enumerate(merged):
        added[: len(leaves)].sum(axis=0, out=table[at])
        added = added[len(leaves) :]
    groups = tuple(
        _LinearPieces(decisions[:, at : at + GROUP_PIECES].ravel(), table[at : at + GROUP_PIECES].ravel())
        for at in range(0, len(merged), GROUP_PIECES)
    )
    return base, groups


def _leaves(
    tree: list[list[Any]], row: list[int], n_compared: int, guards: list[tuple[Term, ...]]
) -> Iterator[Leaf]:
    """Return the leaves from left to right, each with at most BITS decisions on its path.

    Below that depth the whole way becomes one decision, a guard. A leaf that no row can reach is left out.
    """
    left, right, missing_left, value = tree
    open_nodes: list[tuple[int, dict[int, bool]]] = [(0, {})]
    while open_nodes:
        node, path = open_nodes.pop()
        if row[node] < 0:
            yield path, value[node]
            continue
        if len(path) == BITS:
            guards.append(tuple(path.items()))
            path = {n_compared + len(guards) - 1: True}
        for child, goes_right in ((right[node], True), (left[node], False)):
            answer = goes_right == missing_left[node]
            if path.get(row[node], answer) == answer:
                open_nodes.append((child, path | {row[node]: answer}))


def _cut(leaves: Iterator[Leaf]) -> list[list[Leaf]]:
    """Join neighbouring leaves, which share most of their path, while the decisions fit one byte."""
    pieces: list[list[Leaf]] = []
    used: dict[int, bool] = {}
    for path, value in leaves:
        if pieces and len(used | path) <= BITS:
            pieces[-1].append((path, value))
            used |= path
        else:
            pieces.append([(path, value)])
            used = dict(path)
    return pieces


def _merge(pieces: list[list[Leaf]]) -> list[tuple[list[int], list[Leaf]]]:
    """Merge pieces of different trees while their decisions fit one byte: at the first place that fits."""
    by_size = sorted(
        ((frozenset(d for path, _ in leaves for d in path), leaves) for leaves in pieces),
        key=lambda piece: -len(piece[0]),
    )
    full: list[tuple[frozenset[int], list[Leaf]]] = []
    open_pieces: list[tuple[frozenset[int], list[Leaf]]] = []
    for used, leaves in by_size:
        for place, (other, others) in enumerate(open_pieces):
            if len(both := other | used) <= BITS:
                open_pieces[place] = (both, others + leaves)
                if len(both) == BITS:
                    full.append(open_pieces.pop(place))
                break
        else:
            (full if len(used) == BITS else open_pieces).append((used, leaves))
    return [(sorted(used), leaves) for used, leaves in full + open_pieces]
