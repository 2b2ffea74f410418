"""A plan counts a critic: its parameters, the optimizer's state of them, and its programs."""

import pytest
from config_files import load
from test_compile_plan import needs_libtpu, plan
from test_plan_search import place

from mas_jax.model import qwen3
from mas_jax.planning import chips, compile_plan, run_programs

TOY = qwen3.PRESETS["toy-1m"]
PLACE = place(32 * chips.GIB)


def run_of(config_name):
    config = run_programs.fit_mesh(load(config_name).get_config(), PLACE)
    return run_programs.make_run(config, TOY, PLACE, config.train.stages[-1])


def test_a_value_head_is_held_with_its_optimizer_state_and_not_by_the_sampler():
    without, with_critic = run_of("toy_grpo_cascade"), run_of("toy_ppo_cascade")
    more = {name: with_critic.held[name] - held for name, held in without.held.items()}
    # a float32 weight for each of the model's dimensions, and Adam's two moments of it
    head = 4.0 * TOY.model_dim
    assert more == {
        "weights": head, "optimizer state": 2 * head, "the start, as reference": head,
        "the sampler's weights": 0.0, "page pool": 0.0,
    }  # fmt: skip


def test_its_programs_are_part_of_the_plan_and_what_they_make_is_held():
    without, with_critic = run_of("toy_grpo_cascade"), run_of("toy_ppo_cascade")
    assert set(with_critic.program_names) - set(without.program_names) >= {"gae"}
    assert "score of the policy" in with_critic.program_names  # whose values it reads
    workload = compile_plan.Workload(171.0, 45.0)

    def _arrays(run):
        t, micro = run.config.train, compile_plan.num_micro(run, workload)
        filled = 2 ** (micro - 1).bit_length() * t.micro_rows * t.row_length
        return compile_plan.batch_bytes(run, workload) / (4 * filled)

    scores = sum(name.startswith("score of") for name in without.program_names)
    assert _arrays(without) == 8 + scores - (run_programs.START in without.program_names)
    # the policy's own log-probs, values, advantages, returns
    own = sum(name.startswith("score of") for name in with_critic.program_names)
    assert _arrays(with_critic) == 8 + own + 3


@needs_libtpu
def test_the_compiler_plans_advantages_of_all_micro_batches_and_every_update():
    done = plan("--topology=v5p:2x2x1", "--only=gae,optimizer", config="toy_ppo_cascade")
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines() if line}
    t = load("toy_ppo_cascade").get_config().train
    assert float(rows["optimizer"][1]) == t.updates_per_batch == 4
    micro = -(-t.questions * t.group_size * (171 + 45) // (t.row_length * t.micro_rows))
    # compiled for two micro-batches, which cost the same as any other two
    assert float(rows["gae"][1]) == pytest.approx(micro / 2)
