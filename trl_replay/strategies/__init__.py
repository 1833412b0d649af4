"""The built-in strategies, registered through the same hook as plugins'. Imports neither torch nor trl."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ..hookspecs import hookimpl
from ..specs import CorrectionSpec, EvictorSpec, MixerSpec, Preset, SamplerSpec, ScorerSpec, SelectorSpec, StrategySpec
from . import corrections, policies


def _given(strategy: Any) -> Callable[[], Any]:
    """Return a factory without arguments for a strategy that needs no setting, with the strategy's docstring."""

    def factory() -> Any:
        return strategy

    factory.__doc__ = strategy.__doc__
    return factory


SAMPLE_EFFICIENT = """\
For prompts that repeat, where generating a batch takes at least twice as long as training on it. Where stock trains on
the same batch again, this preset trains on groups newly drawn from the buffer. A KL term on prompts that no completion
solves keeps the policy near its reference there.

It needs two settings of GRPOConfig. A pretrained model was measured with `num_iterations=2` and `beta=0.1`, on answers
of up to 7 tokens: 4 saved no more there, and a `beta` of 2.0 held it back. Tiny models without prior knowledge take 5
and 2.0. For answers of 64 tokens or more, set `num_iterations=4`: with two, the preset gained nothing
(docs/evidence.md).

`max_steps` counts updates: with two per batch, double it to generate as much. A `beta` above 0 loads a reference
model, except with LoRA.
"""

SECOND_RUN = """\
For completions that exist already: a fresh policy trains on a file, and generates one batch in all. Every update draws
groups of the file that were used least, in passes.

It needs `replay_warm_start`, and of GRPOConfig `num_iterations` and `max_steps` both set to the number of updates.
`replay_correction="imitation"` trains on the successes alone, as TRL's SFTTrainer does, which learned as much where
answers are right or wrong; with `"ratio"` the run ends lower. The steps:
docs/files.md#you-have-completions-already.
"""


class Builtin:
    """The plugin of the built-in strategies, whose names can't be shadowed."""

    @hookimpl
    def trl_replay_strategies(self) -> Iterator[StrategySpec]:
        """Yield every built-in strategy."""
        yield ScorerSpec("advantage_std", _given(policies.advantage_std), "sum of |advantage| times reward std")
        yield ScorerSpec("reward_std", _given(policies.reward_std), "standard deviation of the rewards")
        yield ScorerSpec("mean_reward", _given(policies.mean_reward), "mean reward")
        yield ScorerSpec("pass_rate", policies.make_pass_rate_scorer, "nearness of the pass rate to a target")
        yield ScorerSpec("recency", _given(policies.recency), "update at generation")
        yield ScorerSpec("constant", _given(policies.constant), "the same priority for all")
        yield EvictorSpec("heap", _given(policies.heap), "evicts the lowest score")
        yield EvictorSpec("fifo", _given(policies.fifo), "evicts the oldest group")
        yield EvictorSpec(
            "prompt_balanced",
            _given(policies.prompt_balanced),
            "evicts the oldest of the prompt with the most groups; then heap",
        )
        yield EvictorSpec("reservoir", _given(policies.reservoir), "keeps a uniform sample of all groups offered")
        yield SamplerSpec("proportional", policies.make_proportional, "drawn in proportion to score^alpha")
        yield SamplerSpec("prompt_balanced", policies.make_prompt_balanced, "score^alpha, shared by a prompt's groups")
        yield SamplerSpec("uniform", _given(policies.uniform), "drawn uniformly")
        yield SamplerSpec("top", _given(policies.top), "the highest scores")
        yield SamplerSpec("newest", _given(policies.newest), "the newest groups")
        yield SamplerSpec("least_used", _given(policies.least_used), "the fewest uses; ties at random")
        yield SamplerSpec("same_prompt", policies.SamePrompt, "entries of the slot's own prompt")
        yield SelectorSpec("zero_std", _given(policies.zero_std), "the dead groups")
        yield SelectorSpec("low_std", policies.make_low_std, "groups with a small reward deviation")
        yield SelectorSpec("min_range", policies.make_min_range, "groups with nearly equal rewards")
        yield SelectorSpec("min_nontrivial", policies.make_min_nontrivial, "groups with few rewards off the mean")
        yield SelectorSpec(
            "top_p_variance", policies.make_top_p_variance, "all but those with the share p of the variance"
        )
        yield SelectorSpec("pass_rate", policies.make_pass_rate_selector, "groups that are too hard or too easy")
        yield SelectorSpec("always", policies.make_always, "a fixed share of every batch")
        yield MixerSpec("whole", _given(policies.whole_groups), "a stored group replaces the whole slot")
        yield MixerSpec("inject", policies.make_inject, "the best stored rows replace the worst fresh ones")
        yield CorrectionSpec("ratio", _given(corrections.ratio), "importance ratio to the behavior policy")
        yield CorrectionSpec("truncated", corrections.make_truncated, "on-policy loss weighted by min(ratio, cap)")
        yield CorrectionSpec("sequence_mask", corrections.make_sequence_mask, "ratio; far off-policy rows are masked")
        yield CorrectionSpec("imitation", corrections.make_imitation, "c × log-likelihood for A > 0, 0 for the rest")
        yield CorrectionSpec("topr", corrections.make_topr, "weight 1 for A > 0, the truncated ratio for A < 0")
        yield CorrectionSpec("per", corrections.SamplingWeights, "ratio, weighted against the sampler's preferences")
        yield CorrectionSpec("none", _given(corrections.none), "no correction; for comparison only")

    @hookimpl
    def trl_replay_presets(self) -> Iterator[Preset]:
        """Yield the recommended bundles of settings."""
        settings = {
            "replay_iterations": "replay",
            "replay_kl": "all_wrong",
            "replay_correction": "topr",
            "replay_start": 0,
        }
        yield Preset("sample_efficient", settings, "more updates per completion", SAMPLE_EFFICIENT)
        settings = {
            "replay_iterations": "replay",
            "replay_sampler": "least_used",
            "replay_correction": "topr",
            "replay_start": 0,
        }
        yield Preset("second_run", settings, "trains on a file of completions, generates one batch", SECOND_RUN)
