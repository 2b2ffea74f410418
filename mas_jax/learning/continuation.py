"""Whether a run may go on under another config than the one that it began with.

Must not know: where configs are kept, what a run does.
"""

import json
from collections.abc import Mapping
from typing import Any

from mas_jax.config import default_config

# what may differ between a checkpoint and the run that continues it; meshes and rows change only
# roundings, an Actor's how it is asked, where it is served, where its answers are kept;
# pretraining and building protocols are other commands'
FREE = (
    "train.log_interval_s", "train.checkpoint_interval", "train.keep_checkpoints", "certify.ignore",
    "mesh", "train.mesh", "train.micro_rows",
    "actor.timeout_s", "actor.retries", "actor.concurrency", "actor.cache", "actor.remember",
    "actor.key_variable", "actor.base_url", "actor.price", "actor.max_cost",
    "pretrain", "math_pretrain", "offline",
)  # fmt: skip


def check_unchanged(saved: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Whether a run with the config `saved` may go on with `config`. Raises: as `check_config`."""
    defaults = json.loads(default_config().to_json_best_effort())
    check_config(saved, config, free=FREE, defaults=defaults)


def check_config(
    saved: Mapping[str, Any],
    wanted: Mapping[str, Any],
    *,
    free: tuple[str, ...],
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Compare a checkpoint's config with the one to continue under, both as JSON sees them.

    `free`: dotted keys that may differ, each with everything below it. `defaults`: what a key meant
    before there was one, so that runs begun without it go on.
    Raises: ValueError that lists every other differing key with both values.
    """
    old, new, meant = (
        {
            key: json.dumps(value, sort_keys=True)
            for key, value in _flat(json.loads(json.dumps(config))).items()
        }
        for config in (saved, wanted, defaults or {})
    )
    differing = [
        f"{key}: checkpoint {old.get(key, 'absent')}, now {new.get(key, 'absent')}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key, meant.get(key)) != new.get(key)
        and not any(key == name or key.startswith(f"{name}.") for name in free)
    ]
    if differing:
        raise ValueError(
            f"the config contradicts the checkpoint: {'; '.join(differing)}; "
            "use the checkpoint's values or another workdir"
        )


def _flat(document: Any, prefix: str = "") -> dict[str, Any]:
    """Entries of nested dicts by dotted key; an empty dict is an entry itself."""
    if not isinstance(document, dict) or not document:
        return {prefix: document}
    flat: dict[str, Any] = {}
    for key, inner in document.items():
        flat |= _flat(inner, f"{prefix}.{key}" if prefix else key)
    return flat
