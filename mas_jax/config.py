"""Every default in one place; `config_rules.py` holds the rules between them.

A config file edits `default_config()`; its sections hold the keyword arguments of the dataclass or
function that the section is named for, so a section's meaning stands there. Values here are the
toy world's, which runs on a laptop. Must not know: what is built from them.
"""

from ml_collections import ConfigDict

from mas_jax.choices import TEAMS


def role(**changes) -> ConfigDict:
    """A row of the role programme (learning/programme.py Row): outcome GRPO but for the changes.

    Raises: KeyError for an unknown key, through the lock of the section.
    """
    row = ConfigDict(
        dict(
            trained=True, advantages=("group",), tree_form="sum", correct="mean", behaviour="none",
            behaviour_weight=0.1, behaviour_cap=6, judge_weights=(0.1, 0.4, 0.5),
            alignment="none", invalid="term", group_by="question",
            scale="std", scale_eps=1e-6, drop_zero_variance=False, teacher="teacher", beta=0.01,
            log_ratio_clip=0.0, future_discount=0.0, gae_discount=1.0, gae_decay=1.0,
            policy_loss="ppo", clip_low=0.2, clip_high=0.2, dual_clip=0.0, divergence="none",
            divergence_coef=1.0, jsd_beta=0.5, gate_slope=5.0, view="none",
            kl_coef=0.0, kl_reference="teacher", kl_estimator="k3", entropy_coef=1e-3,
            value_coef=0.5, value_clip=0.0,
            correction="none", correction_cap=2.0, aggregation="token", weight=1.0,
            outcome="correct", key_weight=0.618, turn_reward="none", step_weight=1.0,
            step_discount=0.95, step_similarity=0.9,
        )
    ).lock()  # fmt: skip
    row.update(changes)
    return row


def cascade_programme(**changes) -> ConfigDict:
    """Stage I, METHODS 1.1: every role on the outcome, the Searcher also on its searching; changes
    are made to both rows."""
    return ConfigDict(
        dict(searcher=role(behaviour="search_activity", **changes), answerer=role(**changes))
    )


def hierarchy_programme(*, beta: float) -> ConfigDict:
    """Stage II, METHODS 1.1: the Searcher distilled token by token, the others on the outcome and
    held near the teacher. beta: 0.01 in the paper; 40 toy updates want 0.1."""
    return ConfigDict(
        dict(
            leader=role(behaviour="assignment", kl_coef=1e-3),
            searcher=role(advantages=("distillation",), beta=beta, entropy_coef=0.0),
            answerer=role(kl_coef=1e-3),
        )
    )


def default_config() -> ConfigDict:
    """A locked ConfigDict: unknown keys and other types are errors that name the key."""
    config = ConfigDict()
    config.seed = 0
    config.model = ConfigDict(
        # a directory in the Hugging Face layout, or "asset:NAME" of mas_jax/assets; "" is the toy
        # starting policy there
        # stepwise: the single agent's turns are prompts of their own, agents/stepwise.py
        dict(
            checkpoint="", dtype="float32", policy="student", template="toy", prompts="toy",
            stepwise=False,
        )
    )  # fmt: skip
    # of one sampling engine; a host has as many engines as its devices make
    config.mesh = ConfigDict(dict(data=1, fsdp=1, tensor=1))
    # data/world.py; families: whose questions are played, () for all
    config.world = ConfigDict(dict(seed=0, closed_share=0.3, train=640, held_out=80, families=()))
    config.arithmetic = ConfigDict(dict(seed=0, train=1000, held_out=200))  # data/arithmetic.py
    # real questions: JSONL files, each of the dataset that it is named for, or directories that
    # data/tfds_questions.py wrote, and what searches their passages: a corpus (with an index that
    # launch/build_index.py made, or "" to make one at the start), or a server. Without test
    # questions the toy world is played in.
    # subject: "facts", which are searched for, or "mathematics", for teams of agents/topology.py,
    # whose toy problems are those of data/arithmetic.py
    # first: training draws from so many questions of each training file, or of the toy's, its first
    # ones, 0 for all: the axis of sample efficiency
    config.data = ConfigDict(
        dict(
            subject="facts", first=0, train=(), weights=(), validation=(), test=(), corpus="",
            index="", server="", dialect="search-r1",
        )
    )  # fmt: skip
    # retrieval/encoder.py EncoderConfig; a directory, "package:minilm", or "hashed", the toy's
    config.encoder = ConfigDict(
        dict(
            directory="hashed", query_prefix="", passage_prefix="", max_tokens=256,
            batch_tokens=0, dtype="float32",
        )
    )  # fmt: skip
    config.retriever = ConfigDict(dict(backend="auto"))  # retrieval/index.py IndexConfig, or "bm25"
    config.engine = ConfigDict(  # sampling/engine_settings.py EngineSettings
        dict(
            context=384, buckets=(128, 256, 384), num_pages=8192, page_size=8, prefill_blocks=64,
            decode_rows=64, decode_steps=16, max_stop_ids=4, min_active_share=0.6,
            dtype="float32", calls="auto", weights="full",
        )
    )  # fmt: skip
    shared = dict(
        waves=3, subtasks=4, passages=3, context=384, observation=256, all_searches=10**9,
        all_tokens=10**9,
    )  # fmt: skip
    config.budgets = ConfigDict(  # agents/setting.py Budgets, one a team; METHODS §1
        dict(
            cascade=dict(turns=5, searcher_turns=5, searches=4, **shared),
            hierarchy=dict(turns=12, searcher_turns=3, searches=2, **shared),
            single=dict(turns=5, searcher_turns=5, searches=4, **shared),
        )
    )
    config.sampling = ConfigDict(  # agents/setting.py Sampling
        dict(
            temperature=1.0, top_p=1.0, top_k=0, candidates=1,
            max_tokens=dict(leader=48, searcher=24, answerer=16),
        )
    )  # fmt: skip
    config.rollout = ConfigDict(  # agents/rollout.py Limits
        dict(concurrent=384, failure_frac=0.1, min_episodes=50)
    )
    config.evaluation = ConfigDict(
        dict(teams=("cascade", "hierarchy"), split="test", num_questions=560, num_runs=4,
             log_interval_s=10.0,
             # each team plays again with at most so many searches, or tokens of Leader and
             # Searchers, an episode: systems at equal cost
             caps=dict(searches=(), tokens=()),
             # and each team with a Collaborator under these values of collaboration.control: what
             # its words are worth
             controls=(),
             # a team, beside which self-consistency plays with as many votes as match its tokens a
             # problem, measured: "" for none
             matched_votes="",
             # the single agent reads the texts of `privileged` behind its questions
             privileged=False,
             published=False)  # numbers of the papers beside ours, where a set is one of theirs
    )  # fmt: skip
    # learning/pipeline.py: stages in the order of train.stages; a stage named "teacher" makes the
    # teacher of those after it, unless teacher.checkpoint names one. sampler: who plays,
    # learning/players.py: "policy", "oracle" (the toy world's script) or "trajectories"
    config.stages = ConfigDict(
        dict(
            teacher=dict(team="cascade", sampler="policy", steps=40,
                         programme=cascade_programme()),
            student=dict(team="hierarchy", sampler="policy", steps=40,
                         programme=hierarchy_programme(beta=0.1)),
        )
    )  # fmt: skip
    # who scores subtasks where a row's behaviour is "judge": agents/judge.py. "oracle" and "length"
    # know the toy world (accuracy; length_bias, full_words); "policy" is the starting policy, "api"
    # an endpoint (base_url without "/chat/completions", the key's environment variable, the model,
    # a directory for answers), both asked with `judge.txt` of the prompt set `prompts`
    config.judge = ConfigDict(
        dict(
            kind="oracle", accuracy=1.0, length_bias=0.0, full_words=24, prompts="full",
            max_tokens=256, max_chars=24_000, base_url="", key_variable="", model="", cache="",
        )
    )  # fmt: skip
    # agents/topology.py Sizes, and how the Collaborator speaks: agents/speaker.py Voice; a prompt
    # beyond context less max_tokens is the outcome "context". prompts: "math", "math_toy" or a
    # folder; vote_temperature: of the Actor's members of a vote or debate; control: what evaluation
    # makes of the Collaborator's words, "none", "other_problem" or "no_answer"; reward_window: 300
    # rewards in training what stands in the last 300 characters of the Actor's solution, as the
    # authors' script does, 0 the last box of all of it, as evaluation does; actor_samples: how many
    # solutions the Actor draws, at vote_temperature, of one hint in training: the reward is their
    # mean, and weighs by its standard error (learning/advantages.py error_weights)
    config.collaboration = ConfigDict(
        dict(
            prompts="math_toy", context=256, max_tokens=48, votes=5, debaters=3, rounds=2,
            experts=3, vote_temperature=0.7, control="none", reward_window=0,
            actor_samples=1,
        )
    )  # fmt: skip
    # the frozen Actor. kind: "none"; "policy" of a checkpoint ("" for the one of `model`) with
    # engines of its own; "api", as for the judge. remember: a directory for its greedy
    # continuations, "" for this process alone. price: of an endpoint, money per million tokens in
    # and out, () if it is not known; max_cost: money that one process may spend there, 0 for no cap
    config.actor = ConfigDict(
        dict(
            kind="none", checkpoint="", dtype="float32", template="toy", temperature=0.0, top_p=1.0,
            top_k=0, context=256, max_tokens=48, remember="",
            engine=config.engine.copy_and_resolve_references(),
            base_url="", key_variable="", model="", cache="", concurrency=16, timeout_s=120.0,
            retries=5, price=(), max_cost=0.0,
        )
    )  # fmt: skip
    # agents/protocol_roles.py Limits: of a question of the offline system that writes protocols
    config.offline = ConfigDict(
        dict(
            rounds=2, subtasks=4, queries=3, passages=3, repairs=2, attempts=2, turns=6,
            max_tokens=1024,
        )
    )  # fmt: skip
    # learning/privileged.py: what teachers of rows with view="privileged" read beside the question.
    # protocols: a file of launch/build_protocols.py; fields of agents/protocol.py FIELDS, () for
    # all; form: "json" or "toy"; control: "none", "empty", "shuffled" or "wrong"
    config.privileged = ConfigDict(
        dict(protocols="", fields=(), form="toy", control="none", fallback="rollout")
    )
    # a file of launch/build_protocols.py whose raw trajectories are what "trajectories" plays
    config.trajectories = ""
    # checkpoint: a directory in the Hugging Face layout; ema_decay: of the teacher named "ema"
    config.teacher = ConfigDict(dict(checkpoint="", ema_decay=0.99))
    config.certify = ConfigDict(  # is the teacher better than the untrained cascade?
        dict(num_questions=140, num_runs=4, ignore=False)
    )
    config.train = ConfigDict(
        dict(
            stages=("teacher", "student"),
            # continued: each stage starts from the policy of the one before, which is "initial" to
            # it, instead of the starting policy; learning_rates: of each stage, () for
            # optimizer.learning_rate in all
            continued=False, learning_rates=(),
            questions=12, group_size=8, candidates=5,
            updates_per_batch=1, temperature=1.0,
            # agents/tree.py Shape: the group is the leaves of so many trees; 0 for whole episodes
            tree=dict(trees=0, expansions=2, rounds=1),
            micro_rows=4, row_length=384, view_length=0, chunk=1024,
            mesh=dict(data=1, fsdp=1, tensor=1),
            dtype="float32", param_dtype="float32", remat="none", backend="auto",
            value_head=False, whiten=True,
            checkpoint_interval=10, keep_checkpoints=2,
            # patience: a stage ends after so many validations in a row without a better one, and
            # the policy that it makes is the best validated; 0: it takes all its steps, and the
            # policy is the last
            validation_interval=0, patience=0, validation_questions=140, validation_runs=1,
            role_gradient_interval=40, drift_frac=0.1, log_interval_s=10.0,
            optimizer=dict(  # learning/update.py OptimizerSettings
                learning_rate=2e-4, warmup_steps=5, schedule="constant", b1=0.9, b2=0.95, eps=1e-8,
                weight_decay=0.0, max_grad_norm=1.0, moment_dtype="float32",
            ),
            alarms=dict(  # learning/alarms.py AlarmSettings
                window=10, searches=0.5, valid_actions=0.8, entropy=0.2, failure_frac=0.05,
                # of a stage with a privileged branch
                length=0.5, growth=1.5, kl_to_start=0.5, style=0.1, leak=0.05,
            ),
        )
    )  # fmt: skip
    config.pretrain = ConfigDict(  # learning/toy_policy.py: the starting policy and its traces
        dict(
            # worlds: other seeds than any that is played in, so that facts must be read, not known
            # from_policy: goes on from the policy of `model.checkpoint`, else from a new preset
            from_policy=False, preset="toy-1m", worlds=(101, 102, 103, 104),
            teams=("cascade", "hierarchy"),
            num_questions=4480, num_episodes=1, num_held_out=70,
            flaws=dict(  # agents/oracle.py Flaws
                stop_early=0.35, drop_word=0.08, whole_question=0.3, misread=0.08,
                skip_search=0.08, from_memory=0.5, waste_report=0.0, shortcut=0.0,
            ),
            # which share of the single agent's questions has a protocol behind it, and how able
            # the script is that wrote it
            protocols=dict(share=0.0, skill=0.9, seed=0),
            settings=dict(  # learning/pretrain.py PretrainSettings
                steps=2000, rows=16, length=256, learning_rate=3e-3, warmup_steps=100,
                weight_decay=0.05, max_grad_norm=1.0, chunk=1024, seed=0,
            ),
        )
    )  # fmt: skip
    config.math_pretrain = ConfigDict(  # learning/math_policy.py: both toy policies of mathematics
        dict(
            preset="toy-1m", seed=101, problems=12_000, held_out=50,
            # all in which either says what it does not in another
            teams=("hint", "critic", "roles", "debate", "guided_debate", "evoagent"),
            # agents/math_oracle.py MathFlaws. The Actor reads an obscure verb wrongly nearly
            # always; the Collaborator mostly, so that alone, and greedy, it is no better, and it
            # seldom makes a plan. Plans must be right more often than the Actor alone is, or vague
            # hints are what is learned
            actor=dict(misread_obscure=0.85, plan=0.1, approve=0.8, persuaded=0.8),
            collaborator=dict(
                misread_obscure=0.55, misread_any=0.03, skip_step=0.03, plan=0.35, approve=0.3,
                persuaded=0.4,
            ),
            # of the Actor, and of the Collaborator, which goes on from it
            steps=dict(actor=800, collaborator=300),
            settings=dict(  # learning/pretrain.py PretrainSettings
                rows=12, length=192, learning_rate=3e-3, warmup_steps=50, weight_decay=0.05,
                max_grad_norm=1.0, chunk=1024, seed=0,
            ),
        )
    )  # fmt: skip
    return config.lock()


# --- other questions, models and machines ---------------------------------------------------------


def real_slices(config: ConfigDict, directory: str) -> None:
    """Real questions and their passages under MiniLM, as launch/smollm2_cpu.sh writes them: trained
    on HotpotQA's training slice, validated on MuSiQue's, tested on 2Wiki and HotpotQA."""
    config.data.update(
        dict(
            train=(f"{directory}/hotpotqa_train100.jsonl",),
            validation=(f"{directory}/musique_train100.jsonl",),
            test=(f"{directory}/2wikimultihopqa.jsonl", f"{directory}/hotpotqa.jsonl"),
            corpus=f"{directory}/corpus.jsonl", index=f"{directory}/index",
        )
    )  # fmt: skip
    config.encoder.update(dict(directory="package:minilm", max_tokens=128))


def smollm2(config: ConfigDict) -> ConfigDict:
    """SmolLM2-135M with examples in its prompts, at sizes for two cores and minutes a step."""
    config.model.update(dict(checkpoint="package:smollm2", template="smollm2", prompts="small"))
    config.engine.update(
        dict(
            context=1024, buckets=(512, 768, 1024), num_pages=3072, page_size=16, prefill_blocks=16,
            decode_rows=16, decode_steps=8,
        )
    )  # fmt: skip
    for team in TEAMS:
        config.budgets[team].update(dict(context=1024, observation=128, passages=1))
    config.sampling.max_tokens.update(dict(leader=48, searcher=48, answerer=48))
    config.rollout.concurrent = 32
    config.evaluation.update(dict(num_questions=50, num_runs=1))
    for stage in config.stages.values():
        stage.steps = 2
    config.train.update(
        dict(
            questions=2, group_size=4, candidates=1, micro_rows=1, row_length=1024, chunk=256,
            remat="dots", checkpoint_interval=1, validation_questions=4, role_gradient_interval=0,
        )
    )  # fmt: skip
    config.train.optimizer.update(dict(learning_rate=1e-6, warmup_steps=1))
    return config


def pod_config(
    checkpoint: str = "Qwen3-4B-Instruct-2507", *, template: str = "qwen-instruct", fsdp: int = 16,
    tensor: int = 4, num_pages: int = 32768,
) -> ConfigDict:  # fmt: skip
    """A real policy on a TPU slice of `fsdp` chips, in engines of `tensor` chips and so many pages
    of 16 positions: METHODS 1.1 and 1.3, sizes by arithmetic. The world is the toy one, in words.
    """
    config, context = default_config(), 8192
    config.model.update(
        dict(checkpoint=checkpoint, dtype="bfloat16", template=template, prompts="full")
    )
    config.mesh.tensor = tensor
    config.engine.update(
        dict(
            context=context, buckets=(2048, 4096, 8192), num_pages=num_pages, page_size=16,
            prefill_blocks=256, decode_rows=256, decode_steps=8, dtype="bfloat16",
        )
    )  # fmt: skip
    for team in TEAMS:
        config.budgets[team].update(dict(context=context, observation=2048))
    config.sampling.max_tokens.update(dict(leader=512, searcher=512, answerer=256))
    config.rollout.concurrent = 512
    for stage in config.stages.values():
        stage.steps = 200
    config.stages.student.programme = hierarchy_programme(beta=0.01)
    t = config.train
    t.update(
        dict(
            questions=128, group_size=8, candidates=5, micro_rows=fsdp, row_length=context,
            dtype="bfloat16", remat="full", checkpoint_interval=20, validation_interval=20,
            role_gradient_interval=50,
        )
    )  # fmt: skip
    t.mesh.fsdp = fsdp
    t.optimizer.update(dict(learning_rate=1e-6, warmup_steps=10, b2=0.999))
    return config
