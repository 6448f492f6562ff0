"""Which layers of a hybrid keep softmax. Ranking needs no torch; probes and sweeps live in `scores` and `sweep`."""

from hybridize.select.result import Selection, choose
from hybridize.select.table import LayerScores, Score, ScoreTable, load_scores

__all__ = ["LayerScores", "Score", "ScoreTable", "Selection", "choose", "load_scores"]
