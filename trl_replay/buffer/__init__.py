"""What is kept, and the policy of what enters, is drawn, and leaves: no trainer, batch, or other process here."""

from .replay_buffer import Drawn, Newcomer, Policy, ReplayBuffer

__all__ = ["Drawn", "Newcomer", "Policy", "ReplayBuffer"]
