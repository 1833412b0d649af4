"""The tiny task that `trl-replay demo` trains: a combination lock, with stock GRPO and with replay."""
