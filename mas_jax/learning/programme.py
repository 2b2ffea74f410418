"""The role programme: one row for each role, which says how that role learns.

A row is plain data; every ablation of the papers is a change to rows. One update executes all of
them, and each divides its streams by counts of its own.
Must not know: arrays, episodes, models.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from mas_jax.records import ROLES

TEACHER = "teacher"  # the stage, and the name that rows give its weights
TEACHERS = (TEACHER, "initial", "live", "ema")
CHOICES = {
    "advantages": ("group", "tree", "step", "distillation", "gae"),
    "tree_form": ("sum", "nested"),
    "outcome": ("correct", "format_tiers", "f1_or_format", "f1_and_keys"),
    "turn_reward": ("none", "search_progress"),
    "correct": ("mean", "first", "majority", "any"),
    "behaviour": (
        "none",
        "search_activity",
        "assignment",
        "search_cost",
        "invalid_action",
        "judge",
    ),
    "alignment": ("none", "weights"),
    "invalid": ("term", "reward"),
    "group_by": ("question", "context"),
    "scale": ("std", "population_std", "none", "leave_one_out"),
    "teacher": TEACHERS,
    "policy_loss": ("ppo", "gspo", "cispo", "sft"),
    "divergence": ("none", "reverse_kl", "forward_kl", "jsd", "gated_log_ratio"),
    "view": ("none", "privileged"),
    "kl_reference": TEACHERS,
    "kl_estimator": ("k1", "k2", "k3"),
    "correction": ("none", "token", "sequence"),
    "aggregation": ("token", "sequence", "all_tokens"),
}


@dataclass(frozen=True)
class Row:
    """How one role learns; coefficients of 0 switch a stream off.

    trained: False for a frozen role, whose tokens are owned and learn nothing.
    advantages: which are summed: "group" (group-relative reward), "tree" (relative to a question's
    leaves and to those of one tree, combined by tree_form, see `advantages.tree_relative`), "step"
    (a turn's return relative to turns that answer a like observation), "distillation" (teacher's
    less own log-prob, times beta), "gae" (a critic's); none is a role without a policy loss.
    Reward: (1 - behaviour_weight) outcome + behaviour_weight behaviour, see `rewards/terms.py`;
    outcome: "correct", or of a single agent one of `rewards/search.py`; key_weight: of
    "f1_and_keys"; correct: how the Answerer's candidates make one number for the other roles;
    behaviour_cap: of "assignment" and "search_cost", which counts an agent's own searches, for the
    Leader all; invalid="reward": an invalid action makes the whole reward -1, not the term.
    behaviour="judge" is a reward of its own: judge_weights of format, correctness and judgement.
    alignment: "weights" makes the role's agents of every episode together weigh alike, as in M-GRPO
    (`alignment.py`); "none" weighs each agent alike.
    turn_reward: beside it, of each turn of a single agent; a critic's and a step's.
    step_weight: of the "step" advantage; step_discount: of a turn's later rewards in its return;
    step_similarity: of observations, from which on they are alike.
    group_by: "question" (all of a question's episodes) or "context" (candidates of one request).
    scale: what a centred reward is divided by; scale_eps is added to it. drop_zero_variance: leave
    groups of equal rewards out of the policy loss and its count (never distillation's tokens).
    log_ratio_clip: on the teacher's log-ratio, 0 for none; future_discount: of the log-ratios of
    later tokens, 0 for a token's own alone. gae_discount, gae_decay: of a critic's advantage.
    policy_loss: "ppo", "gspo", "cispo", or "sft" (no advantage: -log p). dual_clip: 0 for none.
    divergence: an exact distillation loss to `teacher` beside it, with divergence_coef; jsd_beta.
    "gated_log_ratio" is SDAR's loss on the sampled tokens, with gate_slope, which does not follow
    its teacher (`losses.gated_log_ratio` says why): a baseline. view: what the teacher reads:
    the student's context, or "privileged", the question with a text beside it (`privileged.py`);
    then the divergence is a mean over the tokens of traces that have such a text.
    correction: importance weights for what the sampler's numbers differ by, at most correction_cap.
    aggregation: mean over "token"s of the role, over its "sequence"s' means, or over the tokens of
    all roles together ("all_tokens"). weight: of the role in the sum.
    Source: METHODS 1.1 and 1.3 for the values in `config.py`.
    """

    trained: bool
    advantages: tuple[str, ...]
    tree_form: str
    correct: str
    behaviour: str
    behaviour_weight: float
    behaviour_cap: int
    judge_weights: tuple[float, float, float]
    alignment: str
    invalid: str
    group_by: str
    scale: str
    scale_eps: float
    drop_zero_variance: bool
    teacher: str
    beta: float
    log_ratio_clip: float
    future_discount: float
    gae_discount: float
    gae_decay: float
    policy_loss: str
    clip_low: float
    clip_high: float
    dual_clip: float
    divergence: str
    divergence_coef: float
    jsd_beta: float
    gate_slope: float
    view: str
    kl_coef: float
    kl_reference: str
    kl_estimator: str
    entropy_coef: float
    value_coef: float
    value_clip: float
    correction: str
    correction_cap: float
    aggregation: str
    weight: float
    outcome: str
    key_weight: float
    turn_reward: str
    step_weight: float
    step_discount: float
    step_similarity: float

    @property
    def teachers(self) -> frozenset[str]:
        """Names of the teachers that the row reads log-probs of."""
        names = {self.teacher} if "distillation" in self.advantages else set()
        return frozenset(names | ({self.kl_reference} if self.kl_coef else set()))

    @property
    def reads_questions(self) -> bool:
        """Whether its rewards or advantages take more than an episode says of itself."""
        is_plain = self.outcome in ("correct", "format_tiers") and self.turn_reward == "none"
        return not is_plain or "step" in self.advantages

    @property
    def is_exact(self) -> bool:
        """Whether the row learns by the divergence to its teacher's whole distribution."""
        return self.divergence != "none" and self.divergence_coef != 0

    @property
    def is_viewed(self) -> bool:
        """Whether its divergence is to what the teacher says with a text of its own."""
        return self.is_exact and self.view != "none"

    @property
    def distils(self) -> bool:
        """Whether a teacher's distribution moves a parameter of the row."""
        return self.learns and ("distillation" in self.advantages or self.is_exact)

    @property
    def learns(self) -> bool:
        """Whether any stream of the row can move a parameter."""
        streams = (self.kl_coef, self.entropy_coef, self.is_exact)
        has_policy = bool(self.advantages) or self.policy_loss == "sft"
        return self.trained and self.weight != 0 and (has_policy or any(streams))


Programme = Mapping[str, Row]  # role -> row


def make_programme(rows: Mapping[str, Mapping]) -> Programme:
    """Rows from the config's sections. Raises: ValueError that names role, key and choices."""
    programme = {}
    for role, values in rows.items():
        if role not in ROLES:
            raise ValueError(f"programme.{role}: no such role; known: {sorted(ROLES)}")
        for key, choices in CHOICES.items():
            given = values[key]
            for name in [given] if isinstance(given, str) else given:
                if name not in choices:
                    raise ValueError(f"programme.{role}.{key}={name!r}; choose from {choices}")
        tuples = {key: tuple(values[key]) for key in ("advantages", "judge_weights")}
        programme[role] = Row(**{**values, **tuples})
        _check(role, programme[role])
    forms = {role: row.aggregation for role, row in programme.items() if row.learns}
    if {"all_tokens", "sequence"} <= set(forms.values()):
        raise ValueError(f"programme.*.aggregation={forms}: a sum of tokens and sequences has no "
                         "unit; give all roles 'all_tokens', or none")  # fmt: skip
    return programme


def distilled(programme: Programme) -> tuple[str, ...]:
    """Roles with a distillation stream."""
    return tuple(role for role, row in programme.items() if row.distils)


def privileged_roles(programme: Programme) -> tuple[str, ...]:
    """Roles whose teacher reads more than they do."""
    return tuple(role for role, row in programme.items() if row.learns and row.is_viewed)


def _check_reward(role: str, row: Row, where: str) -> None:
    """Raises: ValueError for a reward or a group that is not of the row's role."""
    if row.group_by == "context" and role != "answerer":
        raise ValueError(
            f"{where}.group_by='context': only the answerer draws several candidates from one "
            "context; set 'question'"
        )
    if row.behaviour == "search_activity" and role != "searcher":
        raise ValueError(
            f"{where}.behaviour='search_activity' counts a searcher's own searches; set "
            "'assignment' for a leader, or 'none'"
        )
    if role != "searcher" and (row.behaviour == "judge" or row.alignment != "none"):
        raise ValueError(
            f"{where}.behaviour={row.behaviour!r}, alignment={row.alignment!r}: a judge and "
            "alignment are of a searcher's subtasks; set 'none'"
        )
    if len(row.judge_weights) != 3 or not all(0.0 <= b <= 1.0 for b in row.judge_weights):
        raise ValueError(f"{where}.judge_weights={row.judge_weights}: want three in [0, 1]")
    if row.behaviour == "judge" and row.invalid == "reward":
        raise ValueError(
            f"{where}.invalid='reward' contradicts behaviour='judge', which rewards an invalid "
            "action with 0; set invalid='term'"
        )


def _check(role: str, row: Row) -> None:
    """Raises: ValueError for settings of a row that contradict."""
    where = f"programme.{role}"
    _check_reward(role, row, where)
    if row.policy_loss == "sft" and row.advantages:
        raise ValueError(
            f"{where}.policy_loss='sft' takes no advantage, got {row.advantages}; set advantages=()"
        )
    if {"group", "tree"} <= set(row.advantages):
        raise ValueError(
            f"{where}.advantages={row.advantages}: 'tree' holds the comparison within the question "
            "already; leave out 'group'"
        )
    if not 0.0 <= row.behaviour_weight <= 1.0:
        raise ValueError(f"{where}.behaviour_weight={row.behaviour_weight} is outside [0, 1]")
    if row.divergence == "jsd" and not 0.0 < row.jsd_beta < 1.0:
        raise ValueError(f"{where}.jsd_beta={row.jsd_beta} is outside (0, 1)")
    if not 0.0 <= row.step_discount <= 1.0 or not 0.0 < row.step_similarity <= 1.0:
        raise ValueError(
            f"{where}.step_discount={row.step_discount}, step_similarity={row.step_similarity}: "
            "want the first in [0, 1], the second in (0, 1]"
        )
    if row.turn_reward != "none" and not {"gae", "step"} & set(row.advantages):
        raise ValueError(
            f"{where}.turn_reward={row.turn_reward!r} and advantages={row.advantages}, none of "
            "which reads rewards of turns; add 'gae' or 'step', or set turn_reward='none'"
        )
    positive = ("key_weight", "step_weight", "clip_low", "clip_high", "dual_clip",
                "log_ratio_clip", "weight", "value_clip", "gate_slope")  # fmt: skip
    for key in positive:
        if getattr(row, key) < 0:
            raise ValueError(f"{where}.{key}={getattr(row, key)} is negative; 0 switches it off")
    if row.teacher == "live" and row.distils and not row.is_viewed:
        raise ValueError(
            f"{where}.teacher='live': it agrees with itself and teaches nothing; set "
            "view='privileged', or another teacher"
        )
    if row.view != "none" and not row.is_exact:
        raise ValueError(
            f"{where}.view={row.view!r} is of a divergence, and this row has none; set divergence "
            "and divergence_coef, or view='none'"
        )
