"""The charts of a run over its steps, by section; each chart is a list of metrics.

`present.py` leaves out charts without numbers. A chart with `each` shows every metric whose name begins with `each`,
beside its `series`. Charts that are not over steps are in `bins.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from rollout.rewards.custom import is_returned
from trainer.report.spec import Chart, ChartKind, Dash, Section, Series

EVALUATIONS = "evaluations"
"""Table of the steps with a held-out accuracy."""
_SAMPLING = {"accuracy": "greedy", "accuracy_sampled": "sampled"}
PHASES = ("rollout", "reward", "pack", "train", "sync", "log", "unattributed", "checkpoint", "eval")
"""Layers of the time chart from the bottom up. Evaluation is on top: hiding it leaves no gap."""

LEARNING = Section(
    title="Learning",
    text="Does the policy get better, on the prompts it trains on and on the held-out ones?",
    charts=(
        Chart(
            id="heldout", title="Held-out accuracy", form="percent", from_zero=True,
            note="What the rollout engines answer: with rollout.quantization it is the quantised policy. Reward that "
            "rises while this falls is reward hacking or overfitting.",
            series=(
                Series("eval/accuracy", "greedy", 0, table=EVALUATIONS),
                Series("eval/accuracy_sampled", "sampled", 1, table=EVALUATIONS),
            ),
        ),
        Chart(
            id="heldout_reward", title="Held-out reward",
            note="The mean reward of the sampled held-out responses. If it rises while the accuracy stays 0, the "
            "function gives partial credit below reward.correct.",
            series=(Series("eval/reward_mean", "mean reward", 0, table=EVALUATIONS),),
        ),
        Chart(
            id="reward", title="Reward of the training samples",
            note="Noisy from step to step. A fall that lasts is bad; so is a plateau while the mismatch grows.",
            series=(Series("reward/mean", "mean reward", 0), Series("reward/accuracy", "share correct", 2)),
        ),
    ),
)  # fmt: skip

MISMATCH = Section(
    title="Rollout-training mismatch",
    text="How far the trainer's probabilities are from those of the engine that sampled the tokens. K3 estimates "
    "KL(rollout\u00a0\u2016\u00a0trainer) per response token; the floor is what the rounding of the output head "
    "alone gives.",
    charts=(
        Chart(
            id="k3", title="Mismatch K3", unit="nats per token", form="exponent", log=True,
            note="K3 and its floor rise and fall together while the model changes. A rise of K3 away from its floor is "
            "the earliest warning there is. Single tokens can jump far above the floor, which covers the head only. "
            "Quantised engines and samples of older weights lie far above it by design.",
            series=(Series("mismatch/k3", "K3", 0), Series("mismatch/k3_floor", "floor", 6, dash=Dash.dashed)),
        ),
        Chart(
            id="k3_parts", title="What the mismatch comes from", unit="nats per token", form="exponent", log=True,
            needs="mismatch/k3_weights",
            note="K3 of a few responses, from the rounding of the weights for the engine, and from everything else: "
            "kernels, order of sums, type of the activations. Weights above arithmetic: let the trainer's forward use "
            "the engine's rounding (policy.dtype), or give the engine a finer type.",
            series=(
                Series("mismatch/k3_weights", "rounding of the weights", 1),
                Series("mismatch/k3_arithmetic", "arithmetic", 0),
            ),
        ),
        Chart(
            id="routes", title="K3 with and without replay of routes", unit="nats per token", form="exponent", log=True,
            needs="mismatch/k3_live",
            note="K3 of a few responses with the experts that the engine chose, and with those that the trainer would "
            "choose. What is left with the engine's is rounding, as in a dense model.",
            series=(
                Series("mismatch/k3_live", "trainer's experts", 1),
                Series("mismatch/k3_replayed", "engine's experts", 0),
            ),
        ),
        Chart(
            id="rerouted", title="Tokens that the replay changes", form="percent", from_zero=True,
            needs="mismatch/tokens_rerouted",
            note="Share of the tokens for which the trainer would choose other experts in some layer, and share of all "
            "choices. Both grow with the number of layers and with the age of the weights that sampled.",
            series=(
                Series("mismatch/tokens_rerouted", "tokens", 3), Series("mismatch/routes_changed", "choices", 4),
            ),
        ),
        Chart(
            id="worst", title="Worst token", form="exponent", log=True,
            note="With the same weights on both sides, a probability difference near 1 is a bug: they disagree "
            "completely on some token. Quantised or older weights can come near it without one.",
            series=(
                Series("mismatch/prob_diff_max", "largest probability difference", 3),
                Series("mismatch/k3_max", "largest K3", 1),
            ),
        ),
        Chart(
            id="delta", title="Log-ratio per token", form="exponent", log=True, unit="nats",
            note="The typical token, where K3 is ruled by the few worst. Both rise: everything drifts.",
            series=(Series("mismatch/abs_logdiff_mean", "mean |log-ratio|", 4),),
        ),
        Chart(
            id="ess", title="Effective sample size", form="percent",
            note="Share of the tokens that the weighted average really rests on. Raw weights below 30 % are bad.",
            series=(
                Series("mismatch/ess/raw_token", "raw weights", 0),
                Series("mismatch/ess/applied_token", "applied weights", 2),
                Series("mismatch/kept_frac", "tokens kept", 1),
            ),
        ),
        Chart(
            id="weights", title="Tokens whose weight was cut", form="percent", from_zero=True,
            note="More than one in a hundred at the cap: the correction now shapes the gradient.",
            series=(Series("mismatch/is/clip_frac_hi", "cut", 3),),
        ),
    ),
)  # fmt: skip

REJECTED = Section(
    title="Rejected against kept",
    text="Responses that lost a token to rejection, beside those that lost none. What is thrown away should differ in "
    "its mismatch alone: if it is longer, or better rewarded, rejection bends what the policy learns.",
    charts=(
        Chart(
            id="rs_len", title="Length", unit="tokens", from_zero=True, needs="mismatch/rs/rejected_len",
            note="Rejected above kept: long responses lose their say, because a long one has more tokens to fail on.",
            series=(Series("mismatch/rs/kept_len", "kept", 0), Series("mismatch/rs/rejected_len", "rejected", 1)),
        ),
        Chart(
            id="rs_reward", title="Reward", needs="mismatch/rs/rejected_reward",
            note="The curves should lie together. Rejected above kept: the good responses are being thrown away.",
            series=(Series("mismatch/rs/kept_reward", "kept", 0), Series("mismatch/rs/rejected_reward", "rejected", 1)),
        ),
        Chart(
            id="rs_k3", title="K3", unit="nats per token", form="exponent", log=True,
            needs="mismatch/rs/rejected_k3",
            note="Rejected should lie far above kept; if it does not, the bounds reject at random.",
            series=(
                Series("mismatch/rs/kept_k3", "kept tokens", 0),
                Series("mismatch/rs/rejected_k3", "rejected tokens", 1),
            ),
        ),
        Chart(
            id="rs_frac", title="Share rejected", form="percent", from_zero=True, needs="mismatch/rs/rejected_len",
            note="A share that climbs step by step ends with nothing left to learn from.",
            series=(Series("mismatch/rs/token_frac", "tokens", 3), Series("mismatch/rs/seq_frac", "responses", 7)),
        ),
    ),
)  # fmt: skip

OPTIMISATION = Section(
    title="Optimisation",
    text="Entropy that falls to zero means the policy has stopped exploring; jumps of the gradient norm come "
    "before most collapses.",
    charts=(
        Chart(
            id="entropy", title="Policy entropy", unit="nats per token", from_zero=True,
            note="A slow fall is learning. A fall to zero before the reward is high is collapse; a sudden rise is a "
            "policy that comes apart.",
            series=(Series("policy/entropy", "entropy", 2),),
        ),
        Chart(
            id="grad", title="Gradient norm", from_zero=True,
            note="Spikes are common; a level that rises for many steps is not.",
            series=(Series("optim/grad_norm", "before clipping", 4),),
        ),
        Chart(
            id="ppl", title="Perplexity of the responses",
            note="The same responses, scored on both sides. The gap is the mismatch: a visible one needs quantised or "
            "older weights, or is a bug.",
            series=(
                Series("mismatch/ppl/train", "trainer", 0),
                Series("mismatch/ppl/rollout", "rollout engine", 1, dash=Dash.dashed),
            ),
        ),
        Chart(
            id="clip", title="Tokens at the PPO clip", form="percent", from_zero=True,
            note="With pi_old as the anchor and one optimizer step per rollout it is zero. Many: steps too large, or "
            "too many on old samples.",
            series=(Series("loss/clip_frac_high", "above", 1), Series("loss/clip_frac_low", "below", 0)),
        ),
        Chart(
            id="loss", title="Policy loss",
            note="No measure of success: where advantages have mean zero it is near zero whatever is learnt. Only "
            "jumps mean something.",
            least_span=0.01,
            series=(Series("loss/policy", "loss", 5),),
        ),
        Chart(
            id="lr", title="Learning rate", form="exponent", from_zero=True,
            note="As scheduled; steps in which the policy does not learn leave a gap.",
            series=(Series("optim/lr", "learning rate", 6),),
        ),
    ),
)  # fmt: skip

CRITIC = Section(
    title="Critic",
    text="How much of the returns the critic knew before each step: 1 is everything, 0 no more than their mean.",
    charts=(
        Chart(
            id="explained", title="Explained variance of the returns", form="percent",
            note="Should rise. Below zero the critic does harm.",
            series=(Series("critic/explained_variance", "explained", 2),),
        ),
        Chart(
            id="values", title="Values and returns", unit="reward",
            note="The curves should lie together; a gap that stays is a critic that learns too slowly.",
            series=(
                Series("critic/value_mean", "mean value", 0),
                Series("critic/returns_mean", "mean return", 6, dash=Dash.dashed),
            ),
        ),
        Chart(
            id="value_loss", title="Value loss",
            note="Falls while the critic learns; rises again when the policy moves away from it.",
            series=(Series("critic/loss", "loss", 5),),
        ),
    ),
)  # fmt: skip

TIME = Section(
    title="Where the time goes",
    text="Wall-clock seconds of each step by phase. What no phase accounts for is shown as unattributed. Where engines "
    "sample while the policy trains, rollout is the time that the training waited for samples.",
    charts=(
        Chart(
            id="time", title="Seconds per step", unit="s", kind=ChartKind.stack, from_zero=True, wide=True,
            note="The tallest layer is what to make faster. Layers that grow from step to step are leaks or longer "
            "responses.",
            series=tuple(
                Series(f"time/{name}_s", name, slot)
                for name, slot in zip(PHASES, (0, 3, 7, 1, 2, 5, 6, 7, 4), strict=True)
            ),
        ),
        Chart(
            id="limits", title="Share of the hardware's limit", form="percent", from_zero=True, wide=True,
            note="100 % is as fast as this hardware could be; a small model stays at a few percent, because launches "
            "and Python take its time. A low curve of a phase that takes long is where time can be won.",
            series=(
                Series("perf/step_floor_frac", "step", 6, dash=Dash.dashed),
                Series("perf/rollout_floor_frac", "rollout", 0),
                Series("perf/train_floor_frac", "train", 1),
                Series("perf/sync_floor_frac", "sync", 2),
                Series("perf/mfu", "MFU", 4),
            ),
        ),
        Chart(
            id="speed", title="Speed", unit="tokens/s", from_zero=True,
            note="Response tokens sampled, and tokens trained on with their prompts. A slow fall "
            "at the same response length is a leak.",
            series=(Series("rollout/tokens_per_s", "rollout", 0), Series("perf/train_tokens_per_s", "train", 1)),
        ),
        Chart(
            id="sync", title="Weight sync", unit="GB/s", from_zero=True,
            note="From the trainer's weights to verified weights in every engine.",
            series=(Series("sync/gb_per_s", "GB/s", 2),),
        ),
        Chart(
            id="memory", title="Memory of each process", unit="GiB", from_zero=True, wide=True,
            note="Flat after the first steps. A line that climbs steadily will end the run.",
            series=(Series("perf/train_peak_gib", "rank 0, peak while training", 6, dash=Dash.dashed),),
            each="perf/memory_gib/",
        ),
    ),
)  # fmt: skip

ROLLOUTS = Section(
    title="Rollouts",
    text="What was sampled, and what of it was kept for training.",
    charts=(
        Chart(
            id="length", title="Response length", unit="tokens", from_zero=True,
            note="Growth with reward is thinking; growth without it is padding.",
            series=(Series("rollout/response_tokens_mean", "mean", 0),),
        ),
        Chart(
            id="truncated", title="Truncated responses", form="percent", from_zero=True,
            note="Cut at max_new_tokens and mostly scored as wrong. Raise the limit if many are.",
            series=(Series("rollout/truncated_frac", "truncated", 3),),
        ),
        Chart(
            id="groups", title="Groups sampled", kind=ChartKind.stack, from_zero=True, wide=True,
            note="Dropped groups cost sampling and teach nothing.",
            series=(Series("rollout/groups_kept", "kept", 2),),
            each="rollout/groups_dropped/", each_label="dropped: ",
        ),
        Chart(
            id="failures", title="Failures of your functions", from_zero=True, leaves_out_zero=True,
            note="Calls of the reward and the rollout function that failed, by kind, those that were made again "
            "included, and responses without a reward, which teach nothing. Calls that take too long make their step "
            "slow.",
            series=(
                Series("reward/timeouts", "took too long", 1),
                Series("reward/errors", "raised", 0),
                Series("reward/crashes", "lost their process", 4),
                Series("reward/unscored", "responses without a reward", 3),
                Series("episode/timeouts", "episodes: took too long", 2),
                Series("episode/errors", "episodes: raised", 5),
                Series("episode/crashes", "episodes: lost their process", 6),
                Series("episode/failed", "episodes that ended so", 7),
            ),
        ),
        Chart(
            id="turns", title="Episodes", from_zero=True,
            note="Turns of a response, and tokens that your rollout function has shown to the model. More turns with "
            "the same reward are calls for nothing.",
            series=(
                Series("episode/turns_mean", "turns", 0), Series("episode/shown_tokens_mean", "tokens shown", 1),
            ),
        ),
        Chart(
            id="no_spread", title="Groups whose rewards are all equal", form="percent", from_zero=True,
            note="They teach nothing where the group is the baseline (GRPO, RLOO). Near 100 %: the prompts are too "
            "hard or too easy, or the reward does not tell the answers apart.",
            series=(Series("rollout/zero_variance_frac", "before any is dropped", 3),),
        ),
    ),
)  # fmt: skip


def own_numbers(metrics: Iterable[str]) -> Section:
    """Charts of the `metrics` that are a user's: of tracking.metrics, what a reward function returns beside the score,
    further evaluation sets and several samples per prompt, and the share that a criterion rejects."""
    known = set(metrics)
    charts: dict[str, Chart] = {}
    for metric in sorted(known, key=lambda name: (name.split("/", 1)[1:], name.startswith("eval/"))):
        kind, _, name = metric.partition("/")
        place, _, last = name.rpartition("/")
        label, table, form = metric, "rows", "percent"
        if kind == "eval" and place and last in ("accuracy", "accuracy_sampled"):
            title, label, table = f"Held-out accuracy of {place}", _SAMPLING[last], EVALUATIONS
        elif kind == "eval" and re.fullmatch(r"(pass|maj)@\d+", last):
            title, label, table = f"Held-out accuracy over several samples {place}".rstrip(), last, EVALUATIONS
        elif is_returned(metric):
            title, label, form = metric, "training samples" if kind == "reward" else name, "number"
        elif kind == "eval" and f"reward/{name}" in known and is_returned(f"reward/{name}"):
            title, label, table, form = f"reward/{name}", "held-out", EVALUATIONS, "number"
        elif re.fullmatch(r"mismatch/rs/(?!token_frac|seq_frac).*(?<!_seq)_frac", metric):
            title, label = f"Rejected by {name.removeprefix('rs/').removesuffix('_frac')}", "tokens"
        else:
            continue
        chart = charts.get(title) or Chart(
            id=f"own_{len(charts)}", title=title, series=(), form=form, from_zero=form == "percent"
        )
        series = Series(metric, label, len(chart.series) % 8, table=table)
        charts[title] = replace(chart, series=(*chart.series, series))
    text = "Your own metrics, what your reward function returns, your evaluation sets, and what each criterion rejects."
    return Section(title="Your numbers", text=text, charts=tuple(charts.values()))


SECTIONS: tuple[Section, ...] = (LEARNING, MISMATCH, REJECTED, OPTIMISATION, CRITIC, TIME, ROLLOUTS)
"""All sections of charts over steps, in the order of the page."""
