"""The demo: a tiny model on a task of sparse rewards, stock GRPO and replay."""
