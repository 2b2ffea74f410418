"""mas_jax: trains teams of language-model agents, each role with its own learning signal."""

__version__ = "0.1.0"
