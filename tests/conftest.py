"""Every test sees eight virtual CPU devices, full float32 matmuls and one compilation cache."""

import os
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
# level 0: LLVM's optimiser takes two thirds of the suite's time; the benchmark, which compares
# its results with transformers too, compiles as users do
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
)
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax

ROOT = Path(__file__).resolve().parent.parent

os.environ["MAS_JAX_CACHE"] = str(ROOT / ".cache")

jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_compilation_cache_dir", str(ROOT / ".cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
