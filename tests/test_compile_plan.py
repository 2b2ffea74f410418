"""Plans of small models by the real TPU compiler, in processes of their own; libtpu lies where
launch/test.sh puts it, on the path of these processes alone."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_layers import ROOT

LIBTPU = ROOT / ".cache" / "libtpu"
needs_libtpu = pytest.mark.skipif(
    not (LIBTPU / "libtpu").is_dir(), reason=f"libtpu is not in {LIBTPU}; launch/test.sh puts it"
)
SMALL = (
    "--input_tokens=171", "--output_tokens=45",
    "--config.train.dtype=bfloat16", "--config.engine.dtype=bfloat16",
)  # fmt: skip


def run_python(*arguments: str, path: Path | None = LIBTPU) -> subprocess.CompletedProcess:
    paths = [str(ROOT), str(ROOT / "tests"), *([str(path)] if path else [])]
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=600,
        env={k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
        | {"PYTHONPATH": ":".join(paths)},
    )  # fmt: skip


def plan(
    *arguments: str, config: str = "toy", path: Path | None = LIBTPU
) -> subprocess.CompletedProcess:
    config = f"--config=configs/{config}.py"
    return run_python("launch/plan.py", config, *SMALL, *arguments, path=path)


@needs_libtpu
@pytest.mark.parametrize(
    ("topology", "only", "names"),
    [
        ("v5p:2x2x1", "score of teacher", ["score of teacher", "score of the start"]),
        ("v6e:2x2", "optimizer", ["optimizer"]),
    ],
)
def test_a_plan_says_what_the_programs_need(topology, only, names):
    done = plan(f"--topology={topology}", f"--only={only}")
    assert done.returncode == 0, done.stderr
    head, rule, *lines = done.stdout.splitlines()
    assert head.split()[:3] == ["phase", "runs", "HBM"]
    assert set(rule) == {"-"}
    assert [re.split(r"\s{2,}", line)[0] for line in lines[: len(names)]] == names
    assert "mesh data=1 fsdp=4 tensor=1, 4 engines of 1 devices, 12 questions x 8" in done.stdout
    assert f"memory: 0.3 of {95 if 'v5p' in topology else 32}.0 GiB a device" in done.stdout
    assert "GiB page pool" in done.stdout
    assert "calibrated (an estimate" in done.stdout


@needs_libtpu
def test_rows_of_views_are_part_of_the_gradients():
    tflops = {}
    for name in ("mapd_toy", "toy_protocol_grpo"):
        done = plan("--topology=v5p:2x2x1", "--only=gradients", "--view_tokens=80", config=name)
        assert done.returncode == 0, done.stderr
        row = next(line for line in done.stdout.splitlines() if line.startswith("gradients"))
        tflops[name] = float(re.split(r"\s{2,}", row)[3])
    # three passes over rows of 384 tokens, and one more over views in rows of 768
    assert 1.3 < tflops["mapd_toy"] / tflops["toy_protocol_grpo"] < 3


PREPARED = """
import sys
from mas_jax.planning import compiler
compiler.start_compiler()
import dataclasses
import jax
from mas_jax.config import default_config
from mas_jax.model import qwen3
from mas_jax.planning import chips, compile_plan, cost, run_programs, worker

config = default_config()
config.train.update(dict(micro_rows=4, row_length=512, dtype="bfloat16"))
config.engine.update(dict(dtype="bfloat16", num_pages=65536))  # no layer's pool fits into VMEM
place = chips.make_slice("v6e:2x2")
config = run_programs.fit_mesh(config, place)
model = qwen3.PRESETS["toy-1m"]
run = run_programs.make_run(config, model, place, "student")
"""

SCORE = """
program, _ = worker.optimised(run, "score of teacher")
reader = cost.Reader(
    program, place, run.coords,
    {"jit(_score)/while": 1, "shard_map/while": 1}, compile_plan.splash_kernels(model))
print(reader.cost().flops, compile_plan.forward_flops(model, 4, 512, scored_frac=1.0) / 4)
"""

ENGINE = """
kernels = compile_plan.paged_kernels(model, context=128, parts=1, rows=96, itemsize=2)
def cost_of(layers):
    program, _ = worker.optimised(run, "engine", layers)
    return cost.Reader(program, place, run.sampler_coords, {"jit(_run)/while": 1}, kernels).cost()
four, guess = cost_of(4), cost.extrapolated(cost_of(1), cost_of(2), 4)
print(four.flops, guess.flops, four.num_bytes, guess.num_bytes)
"""

# eight gated layers and their gradient on 65,536 tokens: 9 GiB, so that no constant overhead counts
WHOLE = """
from mas_jax.planning import compiler, memory
compiler.start_compiler()
import jax
import jax.numpy as jnp
from jax.experimental import topologies

device = topologies.get_topology_desc("v5p:2x2x1", platform="tpu").devices[0]
at = jax.sharding.SingleDeviceSharding(device)

def loss(weights, x_TD):
    def body(x_TD, layer):
        up_DF, down_FD = layer
        inner_TF = jax.nn.silu(x_TD @ up_DF.astype(x_TD.dtype))
        return x_TD + inner_TF @ down_FD.astype(x_TD.dtype), None
    y_TD, _ = jax.lax.scan(body, x_TD, weights)
    return jnp.sum(y_TD.astype(jnp.float32) ** 2)

def shape(dtype, *sizes):
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=at)

weights = shape(jnp.float32, 8, 512, 2048), shape(jnp.float32, 8, 2048, 512)
lowered = jax.jit(jax.grad(loss)).lower(weights, shape(jnp.bfloat16, 65536, 512))
compiled = compiler.compile_for_tpu(lowered)
print(memory.peak_bytes(compiled.program), compiled.memory.temporaries + compiled.memory.results)
"""


def figures(script: str, folder: Path) -> list[float]:
    """What a script prints."""
    path = folder / "count.py"
    path.write_text(script)
    done = run_python(str(path))
    assert done.returncode == 0, done.stderr
    return [float(x) for x in done.stdout.split()]


@needs_libtpu
def test_a_mesh_that_no_torus_has_is_one_clear_error():
    mesh = ("--config.train.mesh.fsdp=2", "--config.train.mesh.tensor=8")
    done = plan("--topology=v6e:4x4", *mesh)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert "fsdp=2 x tensor=8 cannot be laid over this slice" in done.stderr


@needs_libtpu
def test_the_compiled_program_has_the_flops_of_the_mathematics(tmp_path):
    compiled, needed = figures(PREPARED + SCORE, tmp_path)
    assert compiled == pytest.approx(needed, rel=0.02)


GRADIENTS = """
import math
program, _ = worker.optimised(run, "gradients")
reader = cost.Reader(
    program, place, run.coords,
    {"jit(_gradients)/while": 1, "shard_map/while": math.ceil(512 / config.train.chunk)},
    compile_plan.splash_kernels(model))
matmuls = 2 * compile_plan.matmul_params(model) * 512 * 4
attention = compile_plan.forward_flops(model, 4, 512, scored_frac=1.0) - matmuls
# backwards twice the matmuls; attention forms its scores again for either of its gradients
print(reader.cost().flops, (3 * matmuls + 4.5 * attention) / 4)
"""


@needs_libtpu
@pytest.mark.slow
def test_gradients_have_the_flops_of_the_mathematics(tmp_path):
    compiled, needed = figures(PREPARED + GRADIENTS, tmp_path)
    assert compiled == pytest.approx(needed, rel=0.05)


@needs_libtpu
@pytest.mark.slow
def test_two_depths_say_what_four_layers_cost(tmp_path):
    flops, guessed_flops, num_bytes, guessed_bytes = figures(PREPARED + ENGINE, tmp_path)
    assert guessed_flops == pytest.approx(flops, rel=0.01)
    assert guessed_bytes == pytest.approx(num_bytes, rel=0.1)


@needs_libtpu
@pytest.mark.slow
def test_lifetimes_say_what_the_compiler_says_of_memory(tmp_path):
    counted, told = figures(WHOLE, tmp_path)
    assert counted == pytest.approx(told, rel=0.03)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--topology=v5p:4x4"], "v5p is a torus of 3 axes"),
        (["--topology=h100"], "wanted CHIP:AxB"),
        (["--stage=third"], "--stage='third' is none of"),
        (["--only=nothing"], "['nothing'] are none of the programs"),
        (["--model=gpt"], "--model: 'gpt' is none of"),
    ],
)
def test_a_wrong_flag_is_one_clear_error(arguments, said):
    done = plan(*arguments)
    if not (LIBTPU / "libtpu").is_dir() and arguments[0][:6] in ("--mode", "--only"):
        pytest.skip("read after the slice is made, which needs libtpu")
    assert done.returncode == 1
    assert said in done.stdout + done.stderr


def test_without_the_compiler_the_error_says_how_to_get_it():
    done = plan("--topology=v6e:2x2", path=None)
    assert done.returncode == 1
    assert "pip install 'mas_jax[plan]'" in done.stdout + done.stderr
