"""TRL's part of `bundle_peers.py`: its trainer takes a step, and the subclass of docs/bundle.md writes a bundle.

`GRPOTrainer.train` of TRL 1.16 runs with a random model of two layers on a CPU. There is no vLLM: `rollout_func`, TRL's
own place for another engine, generates with transformers, from a copy of the model in bfloat16, and returns that
copy's log-probs. So the mismatch is a real one. `use_vllm` is set after the trainer was made, since making it would
start vLLM; from there on the code with vLLM runs.

TRL logs no K3 of the mismatch. Its own K3, of `_compute_loss`, is computed on the same tokens: with the engine's
log-probs as the policy, and the trainer's as the reference.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from bundle_rows import Case, block, documented, step_metrics, tis_weights
from datasets import Dataset
from peer_trl_trainer import _trainer as loss_trainer
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from trainer.replay.bundle import read_bundle

VOCAB = 64
CAP = 3.0
"""TRL's default of vllm_importance_sampling_clip_max."""
METRICS = {
    "sampling/sampling_logp_difference/mean": "mismatch/abs_logdiff_mean",
    "sampling/sampling_logp_difference/max": "mismatch/abs_logdiff_max",
}
"""Metric of TRL -> metric of Parity."""


def cases(place: Path) -> list[Case]:
    """What TRL logged of the step, and what Parity reads out of its bundle, written to `place`."""
    logged, output = _step(place / "trl")
    [written] = sorted((place / "trl" / "bundles").iterdir())
    path = written.rename(place / "trl.safetensors")
    shutil.rmtree(place / "trl")
    found, bundle = step_metrics(path, "tis"), read_bundle(path)
    ours = tis_weights(bundle, cap=CAP)
    mask = output["completion_mask"].bool()
    theirs = output["importance_sampling_ratio"][mask]
    peer = "TRL 1.16"
    return [
        *(
            Case(
                peer=peer,
                name=f"`{name.removeprefix('sampling/')}`",
                metric=metric,
                theirs=logged[name],
                ours=found[metric],
            )
            for name, metric in METRICS.items()
        ),
        Case(
            peer=peer,
            name="`importance_sampling_ratio/mean`",
            metric="mean of min(rho, 3)",
            theirs=logged["sampling/importance_sampling_ratio/mean"],
            ours=ours.double().mean().item(),
        ),
        Case(
            peer=peer,
            name="`importance_sampling_ratio`, token by token",
            largest=(theirs - ours).abs().max().item(),
        ),
        Case(
            peer=peer,
            name="k3 of `_compute_loss`",
            metric="mismatch/k3",
            theirs=_k3(output),
            ours=found["mismatch/k3"],
        ),
    ]


def _step(place: Path) -> tuple[dict[str, float], dict[str, Tensor]]:
    """(what TRL logs, what it gives to its loss) of its first step."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=128, initializer_range=0.3,
        )
    )  # fmt: skip
    with_bundles = documented_subclass()
    outputs: list[dict[str, Tensor]] = []

    class Recording(with_bundles):  # type: ignore[misc, valid-type]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            outputs.append(super()._generate_and_score_completions(inputs))
            return outputs[-1]

    trainer = Recording(
        model=model,
        processing_class=_tokenizer(),
        reward_funcs=_reward,
        train_dataset=Dataset.from_dict({"prompt": [f"t{n} t{n + 1}" for n in range(8)]}),
        rollout_func=_engine,
        args=GRPOConfig(
            output_dir=str(place),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=16,
            num_generations=4,
            max_completion_length=24,
            temperature=1.0,
            beta=0.0,
            vllm_importance_sampling_mode="token_truncate",
            max_steps=1,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
    )
    trainer.use_vllm = True
    trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
    trainer._last_loaded_step = -1
    trainer.train()
    [output] = outputs
    return trainer.state.log_history[0], output


def documented_subclass() -> type[GRPOTrainer]:
    """The subclass of docs/bundle.md."""
    names = documented("def write_padded") | {"GRPOTrainer": GRPOTrainer}
    exec(block("class GRPOTrainerWithBundles"), names)  # noqa: S102 - our own page
    found: type[GRPOTrainer] = names["GRPOTrainerWithBundles"]
    return found


def _reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text) % 3) for text in completions]


def _tokenizer() -> PreTrainedTokenizerFast:
    """One token for each of the words t0 ... t63."""
    words = Tokenizer(models.WordLevel({f"t{n}": n for n in range(VOCAB)}, unk_token="t0"))  # noqa: S106 - no password
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t1")  # noqa: S106 - no password


def _engine(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Generate with a bfloat16 copy of the policy, token by token, and keep its log-probs."""
    # A copy of the object would keep the forward of the policy, which accelerate has put into it.
    engine: Any = Qwen2ForCausalLM(trainer.model.config)
    engine.load_state_dict(trainer.model.state_dict())
    engine.to(torch.bfloat16).eval()
    prompt_ids = [trainer.processing_class(text)["input_ids"] for text in prompts]
    with torch.no_grad():
        generated = engine.generate(
            torch.tensor(prompt_ids),
            attention_mask=torch.ones(len(prompt_ids), len(prompt_ids[0]), dtype=torch.long),
            do_sample=True,
            top_k=0,
            max_new_tokens=24,
            pad_token_id=0,
            eos_token_id=1,
            output_logits=True,
            return_dict_in_generate=True,
        )
    new = generated.sequences[:, len(prompt_ids[0]) :]
    scores = torch.stack(generated.logits, 1).float().log_softmax(-1)
    logprobs = scores.gather(2, new.unsqueeze(2)).squeeze(2)
    ends = [(row == 1).nonzero().flatten().tolist() for row in new]
    lengths = [end[0] + 1 if end else new.shape[1] for end in ends]
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": [row[:length].tolist() for row, length in zip(new, lengths, strict=True)],
        "logprobs": [row[:length].tolist() for row, length in zip(logprobs, lengths, strict=True)],
    }


def _k3(output: dict[str, Tensor]) -> float:
    """TRL's K3 of the tokens: its KL term, with the engine as policy and the trainer as reference."""
    metrics: Any = defaultdict(lambda: defaultdict(list))
    trainer = loss_trainer(beta=1.0, use_bias_correction_kl=False, loss_type="bnpo", _metrics=metrics)
    sampling = output["sampling_per_token_logps"].double()
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (sampling, torch.zeros_like(sampling), None)
    inputs = {
        "prompt_ids": output["prompt_ids"],
        "prompt_mask": output["prompt_mask"],
        "completion_ids": output["completion_ids"],
        "completion_mask": output["completion_mask"],
        "advantages": output["advantages"],
        "ref_per_token_logps": output["old_per_token_logps"].double(),
        "num_items_in_batch": output["completion_mask"].sum(),
    }
    GRPOTrainer._compute_loss(trainer, trainer.model, inputs)
    [found] = metrics["train"]["kl"]
    return float(found)
