"""The policy: a pure, sharded Qwen3-family transformer, its log-prob kernels and its HF converter.

`model/` knows token ids, arrays and meshes; it must not know roles, episodes or rewards.
"""
