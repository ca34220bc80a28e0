"""The directory, or name on the hub, of a model: does it hold a model that Parity can train?

Read before torch or transformers is imported, from config.json and the headers of the safetensors files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from algorithms.config import Problem
from rollout.model.text_part import text_part
from rollout.similar_file import similar_directory
from rollout.weights.experts import EXPERT_NAME, FAMILIES, mixture_of
from rollout.weights.files import INDEX_FILE, tensor_shapes
from trainer.compose.overrides import path_override
from trainer.limits.model_shape import CONFIG_FILE, UnknownShapeError, layer_of, model_directory
from trainer.rundir.weights_source import ADAPTER_CONFIG
from trainer.text.plain import command_line

HUB_TIMEOUT_S = 3.0
"""Seconds for the hub to say whether it has a model; without an answer the run asks again when it fetches the model,
and its memory is not planned before."""
TOKENIZER_FILES = ("tokenizer*", "vocab*")
GENERATION_FILE = "generation_config.json"
JSON_FILES = (
    CONFIG_FILE, GENERATION_FILE, INDEX_FILE, "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "chat_template.json", "tekken.json",
)  # fmt: skip
"""Files of a model that something reads as a JSON object, if they are there."""
EOS_KEY = "eos_token_id"
DTYPE_KEYS = ("torch_dtype", "dtype")
"""The type of the weights, as transformers before 4.56 reads it, and as it is written since."""
CAUSAL_ENDINGS = ("ForCausalLM", "LMHeadModel")
"""How transformers ends the names of classes that predict the next token."""
_SILENT = "its class in transformers does not tell its attention where the sequences of a batch begin"
UNSUPPORTED = {
    "gpt_oss": "its attention has sinks, and windows of 128 tokens, which Parity's has not",
    **dict.fromkeys(("nemotron", "stablelm"), _SILENT),
}
"""model_type -> why it is refused."""
EMBEDDING_NAMES = ("model.embed_tokens.weight", "transformer.wte.weight")


def find_model(key: str, path: str, revision: str | None) -> Path | Problem | None:
    """The directory of a model, or that of its config.json in the hub's cache, fetched if it is not there.

    None if the hub does not answer in time; the Problem with `path` if it has no such model.
    """
    directory = Path(path)
    if directory.is_dir():
        return _broken(key, directory) or _incomplete(key, directory) or _unsupported(key, directory) or directory
    rule = "must be a directory or a repository of the hub that can be read"
    if directory.exists():
        return Problem(
            key=key, rule=rule, value=path, remedy=f"It is a file: {key}={directory.parent} is its directory."
        )
    with suppress(UnknownShapeError):
        return model_directory(path, revision)
    # Imported here because the import takes a quarter of a second, and most runs have their model on the disk.
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import HFValidationError

    try:
        # `hf_hub_download` would ask a silent hub for minutes.
        get_hf_file_metadata(hf_hub_url(path, CONFIG_FILE, revision=revision), timeout=HUB_TIMEOUT_S)
        return Path(hf_hub_download(path, CONFIG_FILE, revision=revision)).parent
    except HFValidationError:
        remedy = similar_directory(path) or "There is no such directory, and it is no name of the hub."
        return Problem(key=key, rule=rule, value=path, remedy=remedy)
    except Exception as error:  # of the hub's library and of its HTTP client, which is no dependency of Parity itself
        status = getattr(getattr(error, "response", None), "status_code", 0)
        if status >= 500 or "Timeout" in type(error).__name__:
            return None
        said = str(error).splitlines()[0]
        remedy = f"There is no such directory here, and the hub cannot be asked or does not give it: {said}"
        remedy = similar_directory(path) or remedy
        return Problem(key=key, rule=rule, value=path, remedy=remedy)


def local_model(path: str, revision: str | None) -> Path | None:
    """The directory of a model for which nothing has to be fetched: its own, or that with weights and tokenizer in the
    hub's cache."""
    if (directory := Path(path)).is_dir():
        return directory
    with suppress(UnknownShapeError, OSError, ValueError):
        directory = model_directory(path, revision)
        if tensor_shapes(directory) and any(any(directory.glob(pattern)) for pattern in TOKENIZER_FILES):
            return directory
    return None


def _incomplete(key: str, directory: Path) -> Problem | None:
    """The Problem of a directory that is no model; `key` decides whether it needs a tokenizer."""
    if (directory / ADAPTER_CONFIG).is_file() and (directory / CONFIG_FILE).is_file():
        return Problem(
            key=key,
            rule=f"must hold a model without the {ADAPTER_CONFIG} of an adapter: transformers would read the model "
            "that the adapter names, and add it",
            value=str(directory),
            remedy="Move the files of the adapter out, or merge it into the model with peft.",
        )
    missing = [name for name in ("config.json", "*.safetensors") if not any(directory.glob(name))]
    if key != "critic.path" and not any(any(directory.glob(name)) for name in TOKENIZER_FILES):
        missing.append("tokenizer.json")
    if not missing and "model_type" in described(directory):
        return None
    lacks = f"with {', '.join(missing)}" if missing else "whose config.json names its model_type"
    remedy = f"model.save_pretrained(DIR) and tokenizer.save_pretrained(DIR) write one; then {key}=DIR."
    if (directory / ADAPTER_CONFIG).is_file():
        remedy = (
            "It is an adapter: parity export <run> DIR, without --adapter, writes the whole model, and parity eval "
            f"<recipe> {command_line(path_override('checkpoint', directory))} evaluates it."
        )
    rule = f"must be the directory of a Hugging Face model, {lacks}"
    return Problem(key=key, rule=rule, value=str(directory), remedy=remedy)


def broken_file(directory: Path) -> str:
    """Name and fault of a file of the model in `directory` that cannot be read; empty if there is none."""
    for name in JSON_FILES:
        path = directory / name
        if not (path.exists() or path.is_symlink()):
            continue
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            return f"{name}: {error}"
        if not isinstance(found, dict):
            return f"{name}: it must hold a JSON object, got {_kind(found)}"
        if name == INDEX_FILE and not isinstance(found.get("weight_map"), dict):
            return f"{name}: weight_map must be a JSON object, got {_kind(found.get('weight_map'))}"
        if name == CONFIG_FILE and (fault := _config_fault(found)):
            return f"{name}: {fault}"
        ends = found.get(EOS_KEY) if name in (CONFIG_FILE, GENERATION_FILE) else None
        listed = ends if isinstance(ends, list) else [] if ends is None else [ends]
        if any(type(each) is not int or each < 0 for each in listed):
            return f"{name}: {EOS_KEY} must be a token id or a list of them, got {ends!r}"
    for path in [*directory.glob("*.jinja"), *directory.glob("additional_chat_templates/*.jinja")]:
        try:
            path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            return f"{path.relative_to(directory)}: {error}"
    return ""


def _config_fault(model: Mapping[str, Any]) -> str:
    """What of this config.json no model can have; empty if there is nothing."""
    if not isinstance(model.get("text_config") or {}, dict):
        return f"text_config must be a JSON object, got {_kind(model['text_config'])}"
    try:
        mixture_of(text_part(model))
    except ValueError as error:
        return str(error)
    for key, dtype in ((key, model.get(key)) for key in DTYPE_KEYS):
        if isinstance(dtype, str) and (dtype == "auto" or not dtype.isidentifier()):
            return f"{key} must be the name of a type, such as bfloat16, got {dtype!r}"
    return ""


def _kind(value: object) -> str:
    return "null" if value is None else "an array" if isinstance(value, list) else json.dumps(value)[:80]


def _broken(key: str, directory: Path) -> Problem | None:
    """The Problem of a directory with a file that cannot be read."""
    if not (fault := broken_file(directory)):
        return None
    return Problem(
        key=key,
        rule="must be the directory of a Hugging Face model whose files can be read",
        value=str(directory),
        remedy=f"{fault}. Mend the file, or copy or download it again.",
    )


def described(directory: Path) -> Mapping[str, Any]:
    """config.json of a model; empty if it cannot be read."""
    try:
        found = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def has_experts(directory: Path) -> bool:
    """True for a mixture of experts that can be trained here."""
    return text_part(described(directory)).get("model_type") in FAMILIES


def _unsupported(key: str, directory: Path) -> Problem | None:
    """The Problem of a whole model that cannot be trained here, or whose files do not fit each other."""
    model = described(directory)
    classes = model.get("architectures") or []

    def problem(rule: str, value: object, remedy: str) -> Problem:
        return Problem(key=key, rule=f"{rule} ({key}={directory})", value=value, remedy=remedy)

    if classes and not any(str(name).endswith(CAUSAL_ENDINGS) for name in classes):
        return problem(
            "must be a causal language model: config.json names another class in architectures",
            ", ".join(map(str, classes)),
            "Parity trains decoders that transformers loads with AutoModelForCausalLM.",
        )
    if (family := text_part(model).get("model_type")) in UNSUPPORTED:
        return problem(f"must be of another family: {UNSUPPORTED[family]}", family, "Use another model.")
    if key != "checkpoint" and (quantized := model.get("quantization_config")):
        return problem(
            "must hold weights that are not quantised: a trainer would read the numbers without their scales, and "
            "config.json has a quantization_config",
            quantized.get("quant_method", "") if isinstance(quantized, dict) else quantized,
            "Name the model in 16 or 32 bits. If that is what the files hold, remove the quantization_config.",
        )
    try:
        shapes = tensor_shapes(directory)
    except (ValueError, OSError) as error:
        return problem("must hold safetensors files that can be read", f"{error}", "Copy or download the file again.")
    text = text_part(model)
    if any(EXPERT_NAME in name for name in shapes) and family not in FAMILIES:
        return problem(
            f"must be a dense model, or a mixture of experts of one of the families {', '.join(FAMILIES)}",
            family,
            "How others store or choose their experts is not known here.",
        )
    expected = text.get("num_hidden_layers")
    in_files = 1 + max((layer for name in shapes if (layer := layer_of(name)) is not None), default=-1)
    if in_files and isinstance(expected, int) and in_files != expected:
        return problem(
            "must hold the weights that its config.json describes: num_hidden_layers is "
            f"{expected}, and the safetensors files hold another number of layers",
            in_files,
            "Save the model again, with save_pretrained.",
        )
    wanted = [text.get("vocab_size"), text.get("hidden_size")]
    found = next((list(shapes[name]) for name in EMBEDDING_NAMES if name in shapes), None)
    if found is not None and None not in wanted and found != wanted:
        return problem(
            "must hold the weights that its config.json describes: vocab_size and hidden_size make an embedding of "
            f"{wanted}, and the safetensors files hold another",
            found,
            "Save the model again, with save_pretrained.",
        )
    return None
