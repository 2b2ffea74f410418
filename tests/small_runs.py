"""Training runs of a tiny policy in the toy world: a pipeline's parts, shared by its tests.

Teams, index, chat, engine, programme and update are the real ones. Where a policy that says nothing
sensible teaches nothing, the script plays instead, with mistakes that follow from the weights.
"""

import dataclasses
import functools
import hashlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from mas_jax import metrics
from mas_jax.agents.oracle import Flaws
from mas_jax.agents.scripted import ScriptedSampler
from mas_jax.config import default_config
from mas_jax.data.tokenizer import make_toy_tokenizer
from mas_jax.learning import loop, pipeline, policy_files, scenes, training_mesh
from mas_jax.model import hf, qwen3, sharding
from mas_jax.model.hf_config import load_config
from mas_jax.sampling.engine import Engine
from mas_jax.sampling.engine_settings import EngineSettings
from mas_jax.sampling.replicas import Replicas

FLAWS = Flaws(0.3, 0.1, 0.3, 0.3, 0.2, 0.5)
SMALL = {  # two questions a step
    "train.questions": 2,
    "train.group_size": 2,
    "train.candidates": 2,
    "train.micro_rows": 4,
    "train.chunk": 512,
    "train.checkpoint_interval": 1,
    "train.role_gradient_interval": 0,
    "train.validation_questions": 7,
    "train.log_interval_s": 1e9,
    "certify.num_questions": 7,
    "certify.num_runs": 1,
    "engine.buckets": (384,),
    "engine.num_pages": 1024,
    "engine.prefill_blocks": 16,
    "engine.decode_rows": 8,
    "engine.decode_steps": 4,
    "sampling.max_tokens.leader": 8,
    "sampling.max_tokens.searcher": 8,
    "sampling.max_tokens.answerer": 4,
    "stages.teacher.steps": 2,
    "stages.student.steps": 2,
}


def save_start(directory: Path, seed: int = 0) -> Path:
    """A random policy of two thin layers with the toy's tokenizer, in the HF layout."""
    tokenizer = make_toy_tokenizer()
    model = dataclasses.replace(
        qwen3.PRESETS["toy-1m"], vocab_size=tokenizer.vocab_size, num_layers=2, model_dim=32,
        ffw_dim=64, num_heads=2, num_kv_heads=1, head_dim=16, max_positions=384,
    )  # fmt: skip
    params = qwen3.init(model, jax.random.key(seed), dtype=jnp.float32)
    params["embed"] = 8 * params["embed"]
    files = directory.with_name(directory.name + "_tokenizer")
    files.mkdir(parents=True)
    tokenizer.save(files)
    hf.save(directory, model, params, tokenizer_dir=files)
    return directory


def small_config(start: Path, **changes):
    """The toy config of two short stages; changes: by dotted key, `__` for a dot."""
    config = default_config()
    values = {name.replace("__", "."): value for name, value in changes.items()}
    config.update_from_flattened_dict({**SMALL, "model.checkpoint": str(start), **values})
    return config


@functools.cache
def scene_of(start: Path) -> scenes.Scene:
    return scenes.make_scene(default_config(), policy_files.load_tokenizer(start))


@functools.cache
def engines_of(start: Path) -> Replicas:
    """One engine on one device."""
    config = small_config(start)
    mesh = sharding.make_mesh(devices=jax.local_devices()[:1])
    shardings = qwen3.param_shardings(load_config(start), mesh)
    model, params = hf.load(start, dtype=jnp.float32, shardings=shardings)
    settings = EngineSettings(**config.engine)
    decode = scene_of(start).tokenizer.decode
    return Replicas([Engine(model, params, settings, policy="student", decode=decode, mesh=mesh)])


def small_pipeline(config, workdir: Path) -> pipeline.Pipeline:
    """What `pipeline.prepare` makes, but for one engine instead of one a device."""
    start = Path(config.model.checkpoint)
    t = config.train
    mesh = training_mesh.make(config)
    model = dataclasses.replace(load_config(start), value_head=t.value_head)
    return pipeline.Pipeline(
        config=config, workdir=workdir, start_directory=start, scene=scene_of(start),
        engines=engines_of(start), mesh=mesh, model=model,
        reference=training_mesh.load_params(start, mesh, dtype=t.dtype, value_head=t.value_head),
    )  # fmt: skip


class Script:
    """The toy world's script as a policy: its mistakes are drawn from the seed and, if `chaotic`,
    from every bit of the weights that were published last."""

    def __init__(self, scene: scenes.Scene, flaws: Flaws = FLAWS, *, chaotic: bool) -> None:
        self._script = ScriptedSampler(scene.world, scene.chat, scene.prompts, flaws)
        self._chaotic, self._seed = chaotic, 0

    def publish(self, params: qwen3.Params) -> None:
        if self._chaotic:
            bits = b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(params))
            self._seed = int.from_bytes(hashlib.blake2b(bits, digest_size=6).digest())

    async def sample(self, prompt, *, key, n, **unused):
        key = dataclasses.replace(key, seed=self._seed)
        samples = await self._script.sample(prompt, key=key, n=n)
        return [
            dataclasses.replace(sample, logprobs=(-1.0,) * len(sample.tokens)) for sample in samples
        ]


def scripted_stage(config, workdir: Path, name: str, *, chaotic: bool = True, **changes):
    """A stage of the config that the script plays; changes: fields of `loop.Stage`."""
    made = small_pipeline(config, workdir)
    script = Script(made.scene, chaotic=chaotic)
    stage: loop.Stage = pipeline.make_stage(made, name)
    world = dataclasses.replace(stage.world, sample=script.sample)
    return dataclasses.replace(
        stage, world=world, publish=script.publish, sampler_counts=dict, **changes
    )


def weights(directory: Path) -> bytes:
    """The file of a policy's weights."""
    return (directory / "model.safetensors").read_bytes()


def written(place: Path) -> list[dict]:
    """A stage's lines of metrics without times."""
    return [
        {
            name: value
            for name, value in line.items()
            if not name.startswith("time/") and not name.endswith("/accelerator_s")
        }
        for line in metrics.read(place / "metrics.jsonl")
    ]
