"""Data: questions, the toy world and tokenizers. Never imports jax."""
