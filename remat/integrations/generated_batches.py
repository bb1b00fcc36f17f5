"""Batches of Trainers that generate the text they train on (TRL's GRPO and RLOO): those of the longest completions.

Such a Trainer's rows are prompts. Its own `_generate_and_score_completions` makes a batch of them here, on a stand-in
for which three answers are given: completions as long as the configuration allows, log-probabilities of zero, and
rewards of zero. So no text is generated, no model runs, and no reward function is called, and a batch
has what the Trainer's loss gets: old log-probabilities, or those of a reference, where its arguments ask for them.

One completion is a token shorter than the others: batches of generated text are padded.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from remat.capture.code_names import attributes_in
from remat.errors import UsageError
from remat.integrations.one_process import one_process

Batch = dict[str, Any]

_ANSWERED_METHODS = ("_generate_single_turn", "_get_per_token_logps_and_entropies", "_calculate_rewards")
_MAKES = "_generate_and_score_completions"
_INSTEAD = "plan with a Workload whose batch is of the longest lengths, and give that plan to RematCallback."


def makes_batches(trainer: Any) -> bool:
    """Return whether the Trainer itself, not its collator, makes the batches for its loss."""
    own = getattr(type(trainer), "_prepare_inputs", None)
    if own is not None and not str(own.__module__).startswith("transformers."):
        return True
    step = inspect.unwrap(type(trainer).training_step)  # of GKD generates, and then computes the loss
    return isinstance(step, types.FunctionType) and any("generate" in name for name in attributes_in(step.__code__))


def reward_models(trainer: Any) -> list[nn.Module]:
    """List the models that judge the text that `trainer` generates."""
    return [each for each in getattr(trainer, "reward_funcs", ()) if isinstance(each, nn.Module)]


def refuse_unknown_batches(trainer: Any) -> None:
    """Raise UsageError for a Trainer that makes batches otherwise than GRPO and RLOO, or from unknown data."""
    name, args = type(trainer).__name__, trainer.args
    if not all(hasattr(trainer, each) for each in (*_ANSWERED_METHODS, _MAKES)):
        raise UsageError(
            f"{name} makes the batches that it trains on in every step, and not as GRPOTrainer does: {_INSTEAD}"
        )
    columns = set(getattr(trainer.train_dataset, "column_names", None) or ())
    unknown = {
        "rollout_func": getattr(trainer, "rollout_func", None),
        "environment_factory": getattr(trainer, "environment_factories", None),
        "tools": getattr(trainer, "tools", None),
        "images": columns & {"image", "images"},
        "vllm_mode='colocate'": getattr(args, "use_vllm", False) and args.vllm_mode == "colocate",
        "use_transformers_continuous_batching": getattr(args, "use_transformers_continuous_batching", False),
    }
    if found := [said for said, given in unknown.items() if given]:
        raise UsageError(
            f"{name} with {found[0]} takes memory that cannot be told from its arguments and prompts: {_INSTEAD}"
        )


class GeneratedBatches:
    """Batches for the loss of a Trainer, made from rows of prompts by `stand_in`, whose state may change.

    longest  maximum tokens of a completion
    waiting  batches of the same generation that exist beside the one being trained on
    """

    def __init__(self, stand_in: Any):
        self._trainer = stand_in
        self.longest = int(stand_in.args.max_completion_length)
        self.waiting = int(stand_in.args.steps_per_generation) - 1
        self._completion = self.longest
        for name in _ANSWERED_METHODS:
            setattr(stand_in, name, getattr(self, name))

    def __call__(self, rows: Sequence[Any]) -> Batch:
        return self.of_length(rows, None)

    def of_length(self, rows: Sequence[Any], length: int | None) -> Batch:
        """Make the batch for `rows`; with completions that end at `length` tokens, if given."""
        if length is not None:
            self._completion = length - self.prompt_length(rows)
            if self._completion < 1:
                raise UsageError(f"a batch of {length} tokens has no room for a completion after the longest prompt.")
        count, group = len(rows), self._trainer.num_generations
        groups = [dict(rows[i % count]) for i in range(-(-count // group) * group)]
        try:
            with one_process(), torch.random.fork_rng(devices=[]):
                made = self._trainer._generate_and_score_completions(groups)
        finally:
            self._completion = self.longest
        return {name: value[:count] if getattr(value, "ndim", 0) else value for name, value in made.items()}

    def longest_first(self, rows: Sequence[Any]) -> list[Any]:
        """Sort `rows` by the length of their prompts, the longest first."""
        lengths = [self.prompt_length([row]) for row in rows]
        return [rows[i] for i in sorted(range(len(rows)), key=lengths.__getitem__, reverse=True)]

    def prompt_length(self, rows: Sequence[Any]) -> int:
        return int(self(rows)["prompt_ids"].shape[1])

    def length(self, rows: Sequence[Any]) -> int:
        """Return the number of tokens in a row of the batch for `rows`."""
        return self.prompt_length(rows) + self.longest

    def _generate_single_turn(self, prompt_ids: list[Any], *args: Any, **kwargs: Any) -> Any:
        token = self._trainer._tokenizer.pad_token_id
        lengths = [max(self._completion - (row == 0), 1) for row in range(len(prompt_ids))]
        completions = [[token] * length for length in lengths]
        if "num_generations" not in inspect.signature(type(self._trainer)._generate_single_turn).parameters:
            return completions  # RLOO's
        return completions, [[0.0] * length for length in lengths] if self._trainer.use_vllm else None

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: torch.Tensor, mask: Any, logits_to_keep: int, *args: Any, **_: Any
    ) -> tuple[torch.Tensor, None, None]:
        return torch.zeros(len(input_ids), logits_to_keep, device=input_ids.device), None, None

    def _calculate_rewards(self, inputs: Any, prompts: list[Any], *args: Any) -> torch.Tensor:
        return torch.zeros(len(prompts), len(self._trainer.reward_funcs), device=self._trainer.accelerator.device)
