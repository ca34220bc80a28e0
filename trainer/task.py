"""TrainConfig -> what a run works on: a local model directory, its tokenizer, the prompts and the scorer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import snapshot_download

from rollout.config import ArithmeticDataConfig
from rollout.data import Dataset, load_dataset, stop_token_ids
from rollout.hf import AutoTokenizer, PreTrainedTokenizerBase
from rollout.rewards import Scorer
from trainer.base_model import build_base_model
from trainer.components import ArithmeticModelConfig, HFModelConfig
from trainer.config import TrainConfig

SNAPSHOT_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
"""What is fetched of a hub model: safetensors weights, configuration and tokenizer; never pickles or code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What a run works on."""

    model_path: Path
    """Local Hugging Face directory; trainer and engines load the same files."""
    tokenizer: PreTrainedTokenizerBase
    dataset: Dataset
    stop_token_ids: tuple[int, ...]
    scorer: Scorer


def resolve_model(config: TrainConfig, *, progress: Callable[[int, int, float], None]) -> Path:
    """The model as a local directory: built, found, or fetched from the hub at its pinned revision."""
    model = config.model
    if isinstance(model, ArithmeticModelConfig) and isinstance(config.data, ArithmeticDataConfig):
        return build_base_model(model, config.data, progress=progress)
    if not isinstance(model, HFModelConfig):
        raise ValueError(f"model={model.kind} cannot be used with data={config.data.kind}")
    path = Path(model.path).expanduser()
    if path.is_dir():
        return path
    return Path(snapshot_download(model.path, revision=model.revision, allow_patterns=SNAPSHOT_FILES))


def load_task(config: TrainConfig, *, progress: Callable[[int, int, float], None]) -> Task:
    """Resolve the model, tokenize the prompts and build the scorer. `progress(step, num_steps, loss)`."""
    model_path = resolve_model(config, progress=progress)
    tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=False)

    def decode(token_ids: list[int]) -> str:
        return str(tokenizer.decode(token_ids, skip_special_tokens=True))

    return Task(
        model_path=model_path,
        tokenizer=tokenizer,
        dataset=load_dataset(config.data, tokenizer),
        stop_token_ids=stop_token_ids(tokenizer, model_path),
        scorer=Scorer(config.reward, max_new_tokens=config.sampling.max_new_tokens, decode=decode),
    )
