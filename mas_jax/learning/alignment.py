"""Weights that make every rollout's sub-trajectories count as equally many, as M-GRPO duplicates.

M-GRPO brings each rollout k, which has d_k agents of a role, to the same number d of them: random
ones are doubled where there are too few, dropped where there are too many. Each then stands in the
batch d / d_k times in expectation, which is its weight here. Must not know: rewards, arrays.
"""

from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np


def target_count(counts_K: Sequence[int]) -> int:
    """d: the smallest number with P(d_k <= d) >= 0.99 over the rollouts k, at least 1.

    Source: M-GRPO (arXiv 2511.13288).
    """
    if not counts_K:
        return 1
    at = -(-99 * len(counts_K) // 100)  # in whole numbers: 0.99 is no float
    return max(1, sorted(counts_K)[at - 1])


def aligned_weights(rollouts_X: Sequence[Hashable], target: int) -> np.ndarray:
    """d / d_k of each agent, [X] float64; rollouts_X: the rollout k that it is of."""
    counts = Counter(rollouts_X)
    return np.asarray([target / counts[key] for key in rollouts_X], np.float64)
