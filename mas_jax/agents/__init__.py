"""The teams: token-exact conversations, typed actions, one role a file, and the rollout.

`agents/` knows tokenizers, prompts and budgets; it must not know engines, devices or training.
"""
