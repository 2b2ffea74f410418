"""The rules of one setting by itself: the names that it chooses from, and no secret in it.

Each list repeats what the module behind it knows, so that a config loads nothing; tests compare.
Must not know: defaults, rules between settings.
"""

from collections.abc import Iterable
from difflib import get_close_matches

TEAMS: dict[str, tuple[str, ...]] = {  # agents/teams.py, with the roles that act in each
    "cascade": ("searcher", "answerer"),
    "hierarchy": ("leader", "searcher", "answerer"),
    "single": ("searcher",),
}
SPLITS = ("train", "validation", "test")
TEMPLATES = (
    "toy", "qwen-instruct", "qwen2.5-instruct", "qwen2.5-math", "qwen3-thinking",
    "qwen3-not-thinking", "smollm2",
)  # fmt: skip
DIALECTS = ("search-r1", "skyrl", "verl", "m-ask")  # retrieval/client.py
BACKENDS = ("auto", "exact", "scann", "device", "bm25")  # retrieval/index.py, bm25_index.py
JUDGES = ("oracle", "length", "policy", "api")  # learning/judges.py make_judge
SAMPLERS = ("policy", "oracle", "trajectories")  # learning/players.py
FORMS = ("json", "toy")  # agents/protocol.py render
PROTOCOL_FIELDS = ("task_type", "reasoning_plan", "grounding_facts", "answer", "partial_findings")
CONTROLS = ("none", "empty", "shuffled", "wrong")  # learning/privileged.py
FALLBACKS = ("rollout", "none")
SCHEDULES = ("constant", "linear", "cosine")
REMATS = ("none", "dots", "full")
WEIGHTS = ("full", "int8")  # sampling/engine_settings.py


def check_choice(where: str, value: str, choices: Iterable[str]) -> None:
    """Raises: ValueError for a value that is none of the choices, with the nearest one."""
    choices = tuple(choices)
    if value not in choices:
        near = get_close_matches(value, choices, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"{where}: {value!r} is unknown; {hint}choose from {choices}")


def check_no_secret(where: str, url: str) -> None:
    """Raises: ValueError, which does not show it, for a URL that may hold a password or a token."""
    if set(url) & set("@?#"):
        raise ValueError(
            f"{where} holds '@', '?' or '#', so perhaps a password, which records, logs and errors "
            "would show; give scheme, host, port and path alone"
        )
