"""An exported checkpoint holds the trained weights, bit for bit, in a directory that transformers loads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from policy_cases import lone_worker, make_config, make_samples, save_policy
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from algorithms.config import AdvantageConfig, Estimator
from rollout.data.dataset import StreamState
from rollout.hf.transformers import AutoModelForCausalLM, AutoTokenizer
from trainer.batch.packing import pack
from trainer.config.recording import CheckpointConfig, EvalConfig
from trainer.policy.model import full_tensors
from trainer.run.export import export_model
from trainer.rundir.checkpoint import POLICY, CheckpointError, RunState, begin_checkpoint, commit_checkpoint


@pytest.mark.parametrize("estimator", [Estimator.grpo, Estimator.gae], ids=["alone", "beside a critic"])
def test_the_exported_model_is_the_trained_one(tmp_path: Path, estimator: Estimator) -> None:
    start = save_policy(tmp_path / "start")
    words = Tokenizer(models.WordLevel({"a": 0, "<eos>": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>").save_pretrained(start)
    config = make_config(start, num_workers=1, advantage=AdvantageConfig(estimator=estimator))
    batch = pack([make_samples()], num_ranks=1, max_tokens=1000, policy_version=0)
    with lone_worker(config, start) as worker:
        worker.train(batch.ranks[0], batch.samples, 1)
        unfinished = begin_checkpoint(tmp_path / "run", 1)
        worker.save_checkpoint(unfinished / POLICY, asynchronous=False)
        stream = StreamState(seed=0, epoch=0, position=0, digest="")
        state = RunState(step=1, policy_version=1, stream=stream, evaluation={"eval/accuracy": 0.5})
        commit_checkpoint(unfinished, state, keep=2)
        trained = {name: tensor.clone() for name, tensor in full_tensors(worker._policy.model)}
    assert export_model(config, tmp_path / "run", tmp_path / "out").state.step == 1
    exported = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out").named_parameters())
    untrained = dict(AutoModelForCausalLM.from_pretrained(start).named_parameters())
    assert exported.keys() == untrained.keys()
    assert all(torch.equal(exported[name], trained[name]) for name in exported)
    assert not any(torch.equal(exported[name], untrained[name]) for name in exported if "proj.weight" in name)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "<eos>"
    with pytest.raises(CheckpointError, match=r"was not trained with checkpoint\.best_metric"):
        export_model(config, tmp_path / "run", tmp_path / "best", best=True)
    for metric, has_it in (("eval/accuracy_sampled", False), ("eval/accuracy", True)):
        keeps_best = replace(config, eval=EvalConfig(every=1), checkpoint=CheckpointConfig(every=1, best_metric=metric))
        if has_it:
            assert export_model(keeps_best, tmp_path / "run", tmp_path / "best", best=True).state.step == 1
            continue
        with pytest.raises(CheckpointError, match=r"no checkpoint of .* has eval/accuracy_sampled"):
            export_model(keeps_best, tmp_path / "run", tmp_path / "best", best=True)
    with pytest.raises(CheckpointError, match="exists"):
        export_model(config, tmp_path / "run", tmp_path / "out")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        export_model(config, tmp_path / "empty", tmp_path / "other")
    assert not (tmp_path / "other").exists()
