"""What is kept, and the rules of what enters, is drawn, and leaves: without a trainer, a batch, or other processes."""

from .replay_buffer import Drawn, Newcomer, ReplayBuffer, Rules

__all__ = ["Drawn", "Newcomer", "ReplayBuffer", "Rules"]
