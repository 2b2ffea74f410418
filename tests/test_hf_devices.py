"""Loading and saving on several devices and processes, and the memory it takes."""

import dataclasses
import os
import socket
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import pytest
from conftest import ROOT
from hf_models import (
    assert_same_bits,
    assert_same_params,
    constant_params,
    random_model,
    read_tensors,
)

from mas_jax.model import hf, qwen3, sharding


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_loading_onto_eight_devices_gives_the_asked_shardings_and_equal_values(tmp_path, family):
    sizes = {"vocab_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    random_model(family, **sizes).save_pretrained(tmp_path / "in")
    config = hf.load_config(tmp_path / "in")
    mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
    shardings = qwen3.param_shardings(dataclasses.replace(config, value_head=True), mesh)
    _, sharded = hf.load(tmp_path / "in", dtype=jnp.float32, shardings=shardings)
    _, plain = hf.load(tmp_path / "in", dtype=jnp.float32)
    assert_same_params(sharded, plain)
    shardings.pop("value_head")
    assert jax.tree.map(lambda x: x.sharding, sharded) == shardings
    assert not sharded["layers"]["wq"].is_fully_replicated

    hf.save(tmp_path / "out", config, sharded)
    assert_same_bits(read_tensors(tmp_path / "out"), read_tensors(tmp_path / "in"))


def test_shardings_of_another_config_are_refused(tmp_path):
    random_model("qwen2").save_pretrained(tmp_path)
    config = hf.load_config(tmp_path)
    mesh = sharding.make_mesh(data=8)
    shardings = qwen3.param_shardings(dataclasses.replace(config, qkv_bias=False), mesh)
    with pytest.raises(ValueError, match="shardings do not fit the config: missing layers/bk"):
        hf.load(tmp_path, dtype=jnp.float32, shardings=shardings)


def run_script(script: str, *arguments: object, devices: int) -> subprocess.Popen:
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
    )  # fmt: skip


def output_of(process: subprocess.Popen) -> str:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    return output


LOAD_AND_SAVE_ON_TWO_PROCESSES = """
    import sys
    import jax, numpy as np
    from mas_jax.model import hf, qwen3, sharding
    process, address, source, target = sys.argv[1:]
    jax.distributed.initialize(address, num_processes=2, process_id=int(process))
    mesh = sharding.make_mesh(fsdp=2, tensor=2)
    shardings = qwen3.param_shardings(hf.load_config(source), mesh)
    config, params = hf.load(source, dtype=np.float32, shardings=shardings)
    _, whole = hf.load(source, dtype=np.float32)
    for x, full in zip(jax.tree.leaves(params), jax.tree.leaves(whole), strict=True):
        assert len(x.addressable_shards) == 2
        for shard in x.addressable_shards:
            np.testing.assert_array_equal(shard.data, np.asarray(full)[shard.index])
    assert not params["layers"]["wq"].is_fully_addressable
    hf.save(target, config, params, max_shard_bytes=40_000)
    assert hf.load_config(target) == config
"""


def test_two_processes_load_their_own_shards_and_write_one_checkpoint(tmp_path):
    sizes = {"vocab_size": 96, "num_key_value_heads": 2, "num_hidden_layers": 2}
    random_model("llama", **sizes).save_pretrained(tmp_path / "in")
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    arguments = (address, tmp_path / "in", tmp_path / "out")
    script = LOAD_AND_SAVE_ON_TWO_PROCESSES
    processes = [run_script(script, i, *arguments, devices=2) for i in range(2)]
    for process in processes:
        output_of(process)
    assert_same_bits(read_tensors(tmp_path / "out"), read_tensors(tmp_path / "in"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]


PEAK_MEMORY_OF_LOAD = """
    import sys
    import jax
    from mas_jax.model import hf, qwen3, sharding

    def status_bytes(key):
        lines = open("/proc/self/status").read().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))

    source, devices = sys.argv[1], jax.devices()
    shardings = None
    if len(devices) > 1:
        mesh = sharding.make_mesh(fsdp=len(devices))
        shardings = qwen3.param_shardings(hf.load_config(source), mesh)
    open("/proc/self/clear_refs", "w").write("5")  # the peak starts again from here
    before = status_bytes("VmRSS")
    _, params = hf.load(source, dtype="bfloat16", shardings=shardings)
    print(status_bytes("VmHWM") - before)
"""


@pytest.fixture(scope="module")
def large_checkpoint(tmp_path_factory):
    """A bfloat16 checkpoint of 220 MB in three files, and the sizes of all and of one parameter."""
    config = qwen3.ModelConfig(
        vocab_size=32768, num_layers=6, model_dim=1024, ffw_dim=3072, num_heads=8, num_kv_heads=4,
        head_dim=128, rope_theta=1e6, max_positions=4096, qk_norm=True,
    )  # fmt: skip
    params = constant_params(config, jnp.bfloat16)
    directory = tmp_path_factory.mktemp("large") / "model"
    hf.save(directory, config, params, max_shard_bytes=100_000_000)
    sizes = [x.nbytes for x in jax.tree.leaves(params)]
    return directory, sum(sizes), max(sizes)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak memory from /proc")
@pytest.mark.parametrize("devices", [1, 4])
def test_loading_takes_the_memory_of_the_result_and_one_parameter(large_checkpoint, devices):
    directory, result_bytes, largest_bytes = large_checkpoint
    output = output_of(run_script(PEAK_MEMORY_OF_LOAD, directory, devices=devices))
    peak_bytes = int(output.split()[-1])
    # 30 MB for the code that loading brings in; the file or the model once more would be 220 MB
    assert result_bytes > 200e6
    assert 0.9 * result_bytes < peak_bytes < result_bytes + largest_bytes + 30e6
