"""One GRPO batch for the update benchmark: the same tokens, advantages and old log-probs for all.

Dimensions: N sequences, P prompt positions (padded on the left), C completion positions (on the
right), T both together. Must not know: how any side lays the batch out or trains on it.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

PAD = 0  # never a token of a sequence: one peer tells padding by the id
GROUP = 8  # completions whose rewards are compared
PROMPT_TOKENS = (30, 120)
COMPLETION_TOKENS = (8, 48)
OLD_LOGPROB_SPREAD = 0.15  # standard deviation; with a clip of 0.2 about a sixth of ratios clip


@dataclass(frozen=True)
class Batch:
    """Token ids i32, masks i32 (1 for tokens), advantages f32 and old log-probs f32 in nats."""

    prompt_ids_NP: np.ndarray
    prompt_mask_NP: np.ndarray
    completion_ids_NC: np.ndarray
    completion_mask_NC: np.ndarray
    advantages_N: np.ndarray
    old_logprobs_NC: np.ndarray

    @property
    def num_tokens(self) -> int:
        """Tokens of all prompts and completions."""
        return int(self.prompt_mask_NP.sum() + self.completion_mask_NC.sum())

    @property
    def num_completion_tokens(self) -> int:
        """Tokens that the loss is a mean over."""
        return int(self.completion_mask_NC.sum())


def make(vocab_size: int, num_sequences: int, *, seed: int) -> Batch:
    """Random ragged prompts and completions, group-relative advantages; old log-probs are noise.

    Add the model's own log-probs to `old_logprobs_NC` for ratios around 1.
    """
    rng = np.random.default_rng(seed)
    prompt_N = rng.integers(*PROMPT_TOKENS, num_sequences, endpoint=True)
    completion_N = rng.integers(*COMPLETION_TOKENS, num_sequences, endpoint=True)
    index_P, index_C = np.arange(prompt_N.max()), np.arange(completion_N.max())
    prompt_mask_NP = (index_P >= prompt_N.max() - prompt_N[:, None]).astype(np.int32)
    completion_mask_NC = (index_C < completion_N[:, None]).astype(np.int32)
    rewards_GK = rng.integers(0, 2, (num_sequences // GROUP, GROUP)).astype(np.float64)
    centred_GK = rewards_GK - rewards_GK.mean(axis=1, keepdims=True)
    advantages_GK = centred_GK / (rewards_GK.std(axis=1, ddof=1, keepdims=True) + 1e-4)

    def _ids(mask: np.ndarray) -> np.ndarray:
        return np.where(mask, rng.integers(PAD + 1, vocab_size, mask.shape), PAD).astype(np.int32)

    noise_NC = OLD_LOGPROB_SPREAD * rng.normal(size=completion_mask_NC.shape)
    return Batch(
        prompt_ids_NP=_ids(prompt_mask_NP),
        prompt_mask_NP=prompt_mask_NP,
        completion_ids_NC=_ids(completion_mask_NC),
        completion_mask_NC=completion_mask_NC,
        advantages_N=advantages_GK.reshape(-1).astype(np.float32),
        old_logprobs_NC=np.where(completion_mask_NC, noise_NC, 0.0).astype(np.float32),
    )


def write(batch: Batch, path: Path) -> None:
    """Stores a batch for the workers."""
    np.savez(path, **vars(batch))


def read(path: Path) -> Batch:
    """A batch that `write` stored."""
    return Batch(**np.load(path))
