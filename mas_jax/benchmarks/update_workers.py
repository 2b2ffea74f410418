"""The sides of the update benchmark: one process each, the same weights, tokens and loss.

A side is a function that gets everything ready and returns its update. The worker answers each
"run" with one update: the seconds it took, the loss at the weights that it started from, and the
gradient's norm before clipping where the side tells it. The parent compares both between the sides,
update by update, and so sees that they do the same work. "exit" is answered with the peak memory.
One update: the clipped policy loss with given old log-probs and advantages as the mean over all
completion tokens, no KL, the gradient clipped by its norm, AdamW with decay on matrices. Float32.
The entropy is computed for the metrics by all three.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mas_jax.benchmarks import update_workload
from mas_jax.benchmarks.processes import answer, peak_bytes
from mas_jax.benchmarks.update_workload import Batch

LEARNING_RATE, WEIGHT_DECAY, MAX_GRAD_NORM, CLIP = 1e-4, 0.01, 1.0, 0.2
BETA1, BETA2, EPS = 0.9, 0.999, 1e-8
ROW_LENGTH = 256  # of our packed rows

Update = Callable[[], dict[str, float]]  # loss and, if known, grad_norm


def _credited(batch: Batch) -> list:
    """The sequences as traces with their advantages; log-probs are the old ones."""
    from mas_jax.learning.credit import Credited
    from mas_jax.records import ROLES, Trace

    credited = []
    for index, advantage in enumerate(batch.advantages_N):
        is_prompt, is_new = batch.prompt_mask_NP[index] > 0, batch.completion_mask_NC[index] > 0
        prompt = batch.prompt_ids_NP[index][is_prompt]
        completion = batch.completion_ids_NC[index][is_new]
        trace = Trace(
            tokens=(*prompt.tolist(), *completion.tolist()),
            owners=(0,) * len(prompt) + (ROLES["answerer"],) * len(completion),
            logprobs=(*(0.0,) * len(prompt), *batch.old_logprobs_NC[index][is_new].tolist()),
            question=str(index // update_workload.GROUP),
            rollout=index % update_workload.GROUP,
            role="answerer", path="answerer", policy="student", turns=(),
        )  # fmt: skip
        credited.append(Credited(trace, reward=0.0, advantage=float(advantage), is_dropped=False))
    return credited


def ours(directory: Path, batch: Batch, *, rows: int) -> Update:
    """mas_jax: a trainer's update on packed rows, `rows` a micro-batch; packing is timed too."""
    import jax
    import jax.numpy as jnp

    from mas_jax.config import role
    from mas_jax.learning import batch as packing
    from mas_jax.learning import update
    from mas_jax.learning.objective import Forward, Scores
    from mas_jax.learning.programme import make_programme
    from mas_jax.learning.trainer import Trainer
    from mas_jax.model import hf, sharding

    config, params = hf.load(directory, dtype=jnp.float32)
    programme = make_programme(
        {"answerer": role(entropy_coef=0.0, clip_low=CLIP, clip_high=CLIP, aggregation="token")}
    )
    settings = update.OptimizerSettings(
        LEARNING_RATE, warmup_steps=0, schedule="constant", b1=BETA1, b2=BETA2, eps=EPS,
        weight_decay=WEIGHT_DECAY, max_grad_norm=MAX_GRAD_NORM, moment_dtype="float32",
    )  # fmt: skip
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    trainer = Trainer(
        programme,
        Forward(config, temperature=1.0, chunk=1024, dtype="float32", remat="none", backend="auto"),
        mesh,
        update.make_optimizer(settings, config, num_updates=1),
        {},
        updates_per_batch=1, whiten=False, ema_decay=0.0,
    )  # fmt: skip
    held = [trainer.init(params)]
    credited = _credited(batch)

    def _update() -> dict[str, float]:
        packed, num_micro, _ = packing.pack(
            credited, programme, micro_rows=rows, length=ROW_LENGTH, agree=lambda count: count
        )
        packed = packing.globalise(packed, mesh)
        scores = Scores(packed.sampler_logprobs_MBT, {}, None, None, None)
        held[0], metrics = trainer.update(held[0], packed, scores, num_micro)
        jax.block_until_ready(held[0])
        return {"loss": metrics["update/loss"], "grad_norm": metrics["update/gradient_norm"]}

    return _update


def _micro_batches(batch: Batch, rows: int) -> list[dict[str, np.ndarray]]:
    """The batch's arrays by name, cut into micro-batches of so many sequences."""
    starts = range(0, len(batch.advantages_N), rows)
    return [{name: x[i : i + rows] for name, x in vars(batch).items()} for i in starts]


def _trl_settings(directory: Path, batch: Batch, rows: int):
    """TRL's own, without its defaults for GPUs: bfloat16, and checkpointing, which costs time."""
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=str(directory.parent / "trl"), report_to="none", save_strategy="no",
        use_cpu=True, bf16=False, gradient_checkpointing=False, disable_tqdm=True,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=-(-len(batch.advantages_N) // rows),
        num_generations=update_workload.GROUP, loss_type="dapo", beta=0.0, epsilon=CLIP,
        learning_rate=LEARNING_RATE, weight_decay=WEIGHT_DECAY, max_grad_norm=MAX_GRAD_NORM,
        adam_beta1=BETA1, adam_beta2=BETA2, adam_epsilon=EPS,
        max_completion_length=batch.completion_ids_NC.shape[1],
    )  # fmt: skip


def trl_trainer(directory: Path, batch: Batch, rows: int) -> tuple:
    """TRL's `GRPOTrainer` with its model and optimizer, whose `training_step` takes micro-batches
    as they are: only where these come from is replaced, since it would sample completions."""
    import datasets
    import torch
    import transformers
    from tokenizers import Tokenizer, models
    from trl import GRPOTrainer

    class _Prepared(GRPOTrainer):
        def _prepare_inputs(self, inputs):
            return inputs

    torch.set_num_threads(os.cpu_count())
    transformers.utils.logging.disable_progress_bar()
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    trainer = _Prepared(
        model=transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="sdpa"
        ),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=_trl_settings(directory, batch, rows),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["<eos>"] * update_workload.GROUP}),
        processing_class=transformers.PreTrainedTokenizerFast(
            tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"
        ),
    )
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    trainer.create_optimizer()
    return trainer, *trainer.accelerator.prepare(trainer.model, trainer.optimizer)


def trl_inputs(batch: Batch, num_items: int) -> dict:
    """A micro-batch as TRL's trainer takes it; num_items: tokens that the loss is a mean over."""
    import torch

    return {
        "prompt_ids": torch.from_numpy(batch.prompt_ids_NP).long(),
        "prompt_mask": torch.from_numpy(batch.prompt_mask_NP).long(),
        "completion_ids": torch.from_numpy(batch.completion_ids_NC).long(),
        "completion_mask": torch.from_numpy(batch.completion_mask_NC).long(),
        "advantages": torch.from_numpy(batch.advantages_N),
        "old_per_token_logps": torch.from_numpy(batch.old_logprobs_NC),
        "num_items_in_batch": torch.tensor(num_items),
    }


def trl_step(trainer, model, optimizer, micros: list[dict]) -> dict[str, float]:
    """One update: a training step on each micro-batch, TRL's clip and its AdamW."""
    losses = [trainer.training_step(model, micro, None) for micro in micros]
    norm = trainer.accelerator.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    optimizer.step()
    model.zero_grad()
    return {"loss": float(sum(losses)), "grad_norm": float(norm)}


def trl(directory: Path, batch: Batch, *, rows: int) -> Update:
    """TRL: `GRPOTrainer.training_step` on each micro-batch of `rows`, then its clip and AdamW."""
    parts = trl_trainer(directory, batch, rows)
    micros = [
        trl_inputs(Batch(**part), batch.num_completion_tokens)
        for part in _micro_batches(batch, rows)
    ]
    return lambda: trl_step(*parts, micros)


def _tunix_model(directory: Path):
    """tunix's Qwen3 with the checkpoint's weights. Its rotary base is fixed whatever one asks."""
    import jax.numpy as jnp
    from tunix.models.qwen3 import model as model_lib
    from tunix.models.qwen3 import params as params_lib

    config = json.loads((directory / "config.json").read_text())
    return params_lib.create_model_from_safe_tensors(
        str(directory),
        model_lib.ModelConfig(
            num_layers=config["num_hidden_layers"], vocab_size=config["vocab_size"],
            embed_dim=config["hidden_size"], hidden_dim=config["intermediate_size"],
            num_heads=config["num_attention_heads"], head_dim=config["head_dim"],
            num_kv_heads=config["num_key_value_heads"], rope_theta=1_000_000,
            norm_eps=config["rms_norm_eps"], use_tied_embedding=config["tie_word_embeddings"],
        ),
        dtype=jnp.float32,
    )  # fmt: skip


def _tunix_trainer(directory: Path, num_micro: int):
    """tunix's trainer with its GRPO loss, put together as its learner does."""
    import jax
    import optax
    from tunix.rl import function_registry
    from tunix.rl import trainer as trainer_lib
    from tunix.rl.grpo.grpo_learner import GRPOConfig
    from tunix.sft import peft_trainer

    optimizer = optax.chain(
        optax.clip_by_global_norm(MAX_GRAD_NORM),
        optax.adamw(
            LEARNING_RATE, b1=BETA1, b2=BETA2, eps=EPS, weight_decay=WEIGHT_DECAY,
            mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
        ),
    )  # fmt: skip
    settings = peft_trainer.TrainingConfig(
        eval_every_n_steps=1, gradient_accumulation_steps=num_micro if num_micro > 1 else None
    )
    trainer = trainer_lib.Trainer(
        _tunix_model(directory), optimizer, settings, custom_checkpoint_metadata_fn=dict
    )
    algorithm = GRPOConfig(
        num_generations=update_workload.GROUP, beta=0.0, epsilon=CLIP, loss_agg_mode="token-mean"
    )
    algorithm.temperature = 1.0
    loss_fn = function_registry.get_policy_loss_fn("grpo")
    trainer.with_loss_fn(
        lambda model, train_example, algo_config: loss_fn(
            model, train_example, algo_config=algorithm, pad_id=update_workload.PAD, eos_id=1
        ),
        has_aux=True,
    )
    trainer.with_gen_model_input_fn(lambda x: {"train_example": x, "algo_config": algorithm})
    return trainer


def tunix(directory: Path, batch: Batch, *, rows: int) -> Update:
    """google-tunix: its GRPO loss in its trainer's jitted step on its Qwen3, `rows` at a time.

    Accumulation averages the micro-batches' token means; advantages are scaled by each one's share
    of the tokens so that the result is the mean over all tokens. Sequences stay padded: without its
    TPU attention kernel the model ignores the segments of packed rows.
    """
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from tunix.rl import common

    parts = _micro_batches(batch, rows)
    trainer = _tunix_trainer(directory, len(parts))
    micros = []
    for part in parts:
        share = part["completion_mask_NC"].sum() * len(parts) / batch.num_completion_tokens
        micros.append(
            common.TrainExample(
                prompt_ids=jnp.asarray(part["prompt_ids_NP"]),
                prompt_mask=jnp.asarray(part["prompt_mask_NP"] > 0),
                completion_ids=jnp.asarray(part["completion_ids_NC"]),
                completion_mask=jnp.asarray(part["completion_mask_NC"] > 0),
                advantages=jnp.asarray(part["advantages_N"] * np.float32(share)),
                ref_per_token_logps=None,
                old_per_token_logps=jnp.asarray(part["old_logprobs_NC"]),
            )
        )
    step, _ = trainer.jit_train_and_eval_step(cache_nnx_graph=True)

    def _update() -> dict[str, float]:
        results = [step(micro) for micro in micros]
        jax.block_until_ready(nnx.state(trainer.model))
        loss = float(np.mean([float(loss) for loss, _, _ in results]))
        # with accumulation the step only knows the norms of the parts
        return {"loss": loss} | ({"grad_norm": float(results[0][2])} if len(parts) == 1 else {})

    return _update


SIDES = {"ours": ours, "trl": trl, "tunix": tunix}


def main() -> None:
    """Entry point of a worker process: the side, and a JSON object of its arguments."""
    side, arguments = sys.argv[1], json.loads(sys.argv[2])
    directory = Path(arguments.pop("directory"))
    batch = update_workload.read(directory / "batch.npz")
    update = SIDES[side](directory / "model", batch, **arguments)
    answer(ready=True)
    for line in sys.stdin:
        if line.strip() == "exit":
            answer(peak_bytes=peak_bytes())
            return
        start = time.perf_counter()
        result = update()
        answer(seconds=time.perf_counter() - start, **result)


if __name__ == "__main__":
    main()
