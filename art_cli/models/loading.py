"""The loading of a base model, its tokenizer and its adapter, in a chosen dtype or 4 bits: the one source of weights.

It neither samples (engines) nor trains (learners); both may hold the same `Weights`. A base is a hub id, a directory,
or a function or GGUF file of which such a directory is made, after which all are loaded in the same way. torch,
transformers and peft are imported inside functions only, so that importing this module costs nothing.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import logging
import math
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from art_cli.config.schema import LoraConfig, ModelConfig
from art_cli.config.sections.model_config import RECORDED, entry_of
from art_cli.models import builtin_models, gguf_base
from art_cli.models.base_files import check_base, gguf_problem, read_template, refuse_pickles
from art_cli.models.precision import (
    DtypeChoice,
    choose_dtype,
    is_quantized,
    keep_layout,
    quantization_settings,
    require_bitsandbytes,
)
from art_cli.runs.durable import new_directory
from art_cli.runs.manifest import write_hashes
from art_cli.runtime import gpus, plugins
from art_cli.runtime.allocator import keep_freed_memory
from art_cli.runtime.errors import ArtError, CheckpointError, RunError, UsageError, one_line

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

UNKNOWN_WIDTH = 4096  # assumed where a configuration has none: that of a model of 8B, whose learning rate is small


HUB_TIMEOUT_S = 10.0
DEFAULT_LENGTH = 4096  # context in tokens of a model whose configuration names none
ADAPTER_FILE, MODEL_FILE = "adapter_model.safetensors", "model.safetensors"


@dataclass
class Weights:
    """A policy's weights in this process, shared by engine and learner.

    Code that runs the model, forward or update, holds `lock`. Code that changes weights increments `version` while it
    holds the lock. A cache of keys and values is dropped once `version` differs from the one it was computed with.
    """

    model: Any  # PeftModel, or a transformers causal LM where lora is None; in eval mode unless a learner is inside
    tokenizer: Any  # transformers tokenizer with a chat template
    device: torch.device
    dtype: torch.dtype  # dtype of the base weights; adapters are float32
    max_length: int  # tokens of prompt and reply together
    base: str  # hub id or directory it was loaded from
    has_adapter: bool
    quantize: str | None = None  # "4bit" if the base was quantized as it was loaded, or None
    version: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def dtype_name(self) -> str:
        """The dtype's name in a configuration. Example: "bfloat16"."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def vocabulary(self) -> int:
        """The number of token ids, also of a model that reads more than text."""
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def stop_ids(self) -> list[int]:
        return stop_ids(self.tokenizer, getattr(self.model, "generation_config", None), self.model.config)

    @contextlib.contextmanager
    def adapter_off(self) -> Iterator[None]:
        """Inside, the model is the reference policy: the same model without its adapter."""
        assert self.has_adapter, "a model without an adapter has no reference"
        with self.model.disable_adapter():
            yield


class Size(NamedTuple):
    """The number of a model's parameters. Example: Size(whole=24_300_000, trained=290_000)"""

    whole: int
    trained: int


def find_base(base: str, *, directory: Path, built: Path, named: str = "model.base") -> str:
    """Returns the hub id or directory to load `base` from.

    A builder, or the conversion of a GGUF file, runs once and writes the directory `built`. Raises UsageError: the
    builder cannot be found, or it fails.
    """
    try:
        build = gguf_base.builder_of(base, directory)
        if build is None and (directory / base).is_dir():
            return str((directory / base).resolve())
        if build is None and ":" not in base:
            return base
        base = base if build is not None else entry_of(base)
    except (ValueError, UsageError) as error:
        raise UsageError(f"{named}: {error}") from None
    if os.path.lexists(built) and not built.is_dir():
        raise RunError(f"{built}: not a directory; remove it and the base model is built there again")
    if not built.exists():
        build = build or _builder(base, directory)
        _hide_progress_bars()
        try:
            with new_directory(built) as empty:
                build(empty)
                write_hashes(empty)
        except UsageError as error:
            raise UsageError(f"{named}: {error}") from error
        except Exception as error:
            raise UsageError(f"{named}: {base} failed: {type(error).__name__}: {error}") from error
    return str(built)


def _builder(base: str, directory: Path) -> Callable[[Path], None]:
    module, _, function = base.rpartition(":")
    build: Callable[[Path], None] = (
        getattr(builtin_models, function.replace("-", "_"))
        if module == RECORDED
        else plugins.resolve(base, base=directory)
    )
    return build


# A function that loads a model with a fresh adapter: (config, base, device, dtype, seed) -> PeftModel or causal LM
ModelLoader = Callable[["ModelConfig", str, "torch.device", "torch.dtype", int], Any]


def load_weights(
    config: ModelConfig,
    base: str,
    *,
    device: str = "auto",
    seed: int = 0,
    load: ModelLoader | None = None,
    named: str | None = None,
) -> Weights:
    """Returns the model and tokenizer at `base` (a hub id or directory), with a fresh adapter where the config has one.

    The adapter starts as no change at all (B = 0), its A is drawn from `seed`. `load` takes the place of transformers
    and peft. `named` is what errors call a base that no configuration names, as in "--base 'x'".
    Raises UsageError: nothing loadable there, no chat template, or the model lacks a module to adapt.
    """
    import torch

    _spare_collector(has_transformers=load is None, has_adapter=config.lora is not None)
    target = torch.device(pick_device(device))
    if target.type == "cpu":
        keep_freed_memory()
    else:
        grow_segments()
    name = resolve_dtype(config, base, device=device, named=named).name
    with loading(base, named):
        dtype = getattr(torch, name)
        model = (load or _load_model)(config, base, target, dtype, seed)  # Unsloth's comes before transformers' import
    tokenizer = templated_tokenizer(config, base, named=named)
    max_length = length_of(config, model.config)
    model.eval()
    has_adapter = config.lora is not None
    return Weights(model, tokenizer, target, dtype, max_length, base, has_adapter, quantize=config.quantize)


def templated_tokenizer(config: ModelConfig, base: str, *, named: str | None = None) -> Any:
    """Returns the tokenizer at `base` with the configuration's chat template. Raises UsageError: it has none."""
    with loading(base, named):
        tokenizer = load_tokenizer(base)
    if config.chat_template is not None:
        tokenizer.chat_template = read_template(config.chat_template)
    if not tokenizer.chat_template:
        cure = "give it a chat_template.jinja" if named else f"{template_cure(tokenizer)} in model.chat_template"
        raise UsageError(f"{base if named else config.base}: its tokenizer has no chat template; {cure}")
    return tokenizer


def resolve_dtype(
    config: ModelConfig, base: str, *, device: str = "auto", named: str | None = None, may_be_exact: bool = False
) -> DtypeChoice:
    """Returns the dtype that the configuration names, or that the device decides (`choose_dtype`).

    Raises UsageError as `load_weights` does.
    """
    require_base(base, named)
    if config.dtype != "auto":
        return DtypeChoice(config.dtype, "")
    with loading(base, named):
        return choose_dtype(base, pick_device(device), may_be_exact=may_be_exact)


def read_shape(base: str) -> Any:
    """Returns the transformers configuration for a hub id or directory. Raises UsageError as `load_weights`."""
    import transformers

    require_base(base, None)
    with loading(base, None):
        return transformers.AutoConfig.from_pretrained(base, trust_remote_code=False)


def width_of(shape: Any) -> int:
    """Returns the size of the hidden states, by default UNKNOWN_WIDTH."""
    return int(getattr(shape.get_text_config(), "hidden_size", UNKNOWN_WIDTH))


def load_checkpoint(
    weights: Weights, checkpoint: Path, *, part: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
) -> None:
    """Puts a checkpoint's adapter (or whole model, where there is no adapter) into `weights`.

    For a model that is divided between processes, `part(tensor, own)` is the part of a whole tensor that belongs in
    `own`. Raises CheckpointError: no weights there, or weights of another shape.
    """
    from safetensors.torch import load_file

    path = checkpoint / (ADAPTER_FILE if weights.has_adapter else MODEL_FILE)
    if not path.is_file():
        refuse_pickles(checkpoint)
        if (checkpoint / "remote.json").is_file():
            raise CheckpointError(
                f"{checkpoint}: its weights are on a server: engine=tinker learner=tinker go on with it"
            )
        raise CheckpointError(f"{checkpoint}: no {path.name}; is model.lora what it was when this was trained?")
    with fitting(path):
        tensors = load_file(path)
        with weights.lock:
            _set_tensors(weights, tensors if part is None else _parts(weights, tensors, part))
            weights.version += 1


def on_base(base: Weights, adapter: Path | None) -> Weights:
    """Returns a policy of a bare base model and a saved adapter, or of the base alone; the base's tensors are shared.

    adapter_config.json describes the adapter, and the adapter's tokenizer replaces the base's. Any number of
    policies may share one base without seeing each other. Raises CheckpointError: no LoRA adapter, or another model's.
    """
    assert not base.has_adapter, "adapters are put on a bare base model"
    memo = {id(tensor): tensor for tensor in [*base.model.parameters(), *base.model.buffers()]}
    model = copy.deepcopy(base.model, memo)
    if adapter is None:
        return replace(base, model=model, version=0, lock=threading.RLock())
    model = _wrap(model, adapter)
    tokenizer = base.tokenizer
    if (adapter / "tokenizer_config.json").is_file():
        with fitting(adapter / "tokenizer.json"):
            tokenizer = load_tokenizer(str(adapter))
    weights = replace(base, model=model, tokenizer=tokenizer, has_adapter=True, version=0, lock=threading.RLock())
    load_checkpoint(weights, adapter)
    return weights


def with_adapter(base: Weights, lora: LoraConfig, seed: int) -> Weights:
    """A policy made of a bare base model and a fresh adapter, drawn as `load_weights` does; the tensors are shared.

    Raises UsageError: a module to adapt that the model does not have.
    """
    bare = on_base(base, None)
    return replace(bare, model=add_adapter(bare.model, lora, seed).eval(), has_adapter=True)


def clone_trainable(weights: Weights) -> Weights:
    """Returns the same policy with a copy of the trainable weights; both share the frozen ones."""
    frozen = [parameter for parameter in weights.model.parameters() if not parameter.requires_grad]
    memo = {id(tensor): tensor for tensor in [*frozen, *weights.model.buffers()]}
    with weights.lock:
        model = copy.deepcopy(weights.model, memo)
    return replace(weights, model=model, version=0, lock=threading.RLock())


def save_weights(weights: Weights, directory: Path, *, tensors: dict[str, torch.Tensor] | None = None) -> None:
    """Writes a plain PEFT directory (or a transformers one, where there is no adapter), tokenizer included.

    `tensors` are the trained ones by their names in the model, by default those of the model.
    """
    with weights.lock:
        whole = {} if weights.has_adapter else {"max_shard_size": 2**60}  # always one file
        weights.model.save_pretrained(directory, state_dict=tensors, **whole)
        weights.tokenizer.save_pretrained(directory)
    (directory / "README.md").unlink(missing_ok=True)  # peft's empty model card
    if weights.has_adapter:
        _settle(directory / "adapter_config.json")


def _settle(path: Path) -> None:
    """Makes equal adapters equal files: the targets, a set in peft, get an order, and no directory of the base stays.

    The manifest names the base.
    """
    config = json.loads(path.read_text())
    if isinstance(targets := config.get("target_modules"), list):
        config["target_modules"] = sorted(targets)
    if Path(config.get("base_model_name_or_path") or "").is_dir():
        config["base_model_name_or_path"] = None
    path.write_text(json.dumps(config, indent=2, sort_keys=True))


def merge(weights: Weights) -> Weights:
    """Returns the same policy without an adapter: W + alpha / rank * B A replaces W.

    `weights` cannot be used afterwards.
    """
    if not weights.has_adapter:
        return weights
    with weights.lock:
        return replace(weights, model=weights.model.merge_and_unload(safe_merge=True), has_adapter=False)


def save_merged(weights: Weights, directory: Path, dtype: str) -> None:
    """Writes a directory in that dtype, which transformers, vLLM and `art` load. Converts `weights` too."""
    import torch

    assert not weights.has_adapter, "an adapter is merged first"
    _hide_progress_bars()
    with weights.lock:
        weights.model.to(getattr(torch, dtype))
        weights.model.save_pretrained(directory)
        weights.tokenizer.save_pretrained(directory)


def count_parameters(model: Any) -> Size:
    """Returns the model's size. A weight kept in 4 bits counts with its unpacked shape."""
    parameters = list(model.parameters())
    shapes = [getattr(getattr(p, "quant_state", None), "shape", p.shape) for p in parameters]
    sizes = [math.prod(shape) for shape in shapes]
    return Size(sum(sizes), sum(size for size, p in zip(sizes, parameters, strict=True) if p.requires_grad))


def token_logprobs(weights: Weights, token_ids: Sequence[int]) -> list[float]:
    """[L - 1] logprobs in nats of each token after the first, by transformers' own forward; float32 log-softmax."""
    import torch

    ids = torch.tensor(list(token_ids), device=weights.device)
    with weights.lock, torch.no_grad():
        logits = weights.model(ids[None], use_cache=False).logits[0, :-1].float()
        found: list[float] = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0].tolist()
    return found


def length_of(config: ModelConfig, files: Any) -> int:
    """Returns the number of tokens of prompt and reply together: `model.max_length`, or what the model was made for.

    Raises UsageError if a longer sequence would turn the positions of all others in its batch by other angles.
    """
    most = context_of(files)
    if config.max_length is not None and config.max_length > most and _changes_angles(files):
        raise UsageError(
            f"model.max_length: beyond {most} tokens this model takes other angles; set it to at most {most}"
        )
    return config.max_length or most


def context_of(config: Any) -> int:
    """Returns the number of tokens of prompt and reply that the model of a transformers configuration was made for.

    With a rotary embedding that takes other angles for a batch with a longer sequence in it, it is the length up to
    which it does not: caches and packs hold sequences of all lengths beside each other.
    """
    text = config.get_text_config()
    length: int | None = getattr(text, "max_position_embeddings", None)
    if _changes_angles(config):
        original = _rope_of(text).get("original_max_position_embeddings")
        length = original or getattr(text, "original_max_position_embeddings", None) or length
    return length or DEFAULT_LENGTH


def _changes_angles(config: Any) -> bool:
    rope = _rope_of(config.get_text_config())
    return (rope.get("rope_type") or rope.get("type")) in ("longrope", "dynamic")


def _rope_of(text: Any) -> dict[str, Any]:
    found = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    return found if isinstance(found, dict) else {}


def pick_device(device: str, named: str = "learner.device") -> str:
    """Returns the device that a configuration means. Example: "cuda" for "auto" where torch sees a GPU, else "cpu".

    Raises UsageError: this machine, or this torch, does not have it.
    """
    import torch

    if device == "auto":
        if torch.cuda.is_available():
            return "cuda"
        if problem := idle_gpu():
            raise UsageError(f"{problem}; or set {named}=cpu, or CUDA_VISIBLE_DEVICES= for the CPU")
        return "cpu"
    kind, _, index = device.partition(":")
    try:
        if kind == "cuda":
            is_there = int(index or 0) < torch.cuda.device_count()  # counting takes no memory of the GPU
        else:
            is_there = torch.empty(0, device=device) is not None
    except (RuntimeError, AssertionError, ImportError):
        is_there = False
    if not is_there:
        raise UsageError(
            f"{named}: torch {torch.__version__} finds no {device} on this machine; set it to auto, or cpu"
        )
    return device


def idle_gpu() -> str:
    """Returns why torch does not use the NVIDIA GPU of this machine, with the cure, or "" if it has none or uses it."""
    import torch

    if torch.cuda.is_available() or not gpus.has_nvidia(os.environ):
        return ""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        reason = "it counts no device"
    except (RuntimeError, AssertionError) as error:
        reason = str(error)
    return gpus.idle_gpu(torch.__version__, torch.version.cuda, reason, gpus.driver())


def grow_segments() -> None:
    """Lets a GPU's blocks of memory grow, so that few are left between them when a step has freed its own.

    It is set in this process and not by PYTORCH_ALLOC_CONF, because vLLM, a child that inherits the environment,
    captures graphs that do not take such blocks. A user's own settings in the environment are left as they are.
    """
    import torch

    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        older: Any = torch.cuda.memory._set_allocator_settings  # in torch 2.9
        getattr(torch._C, "_accelerator_setAllocatorSettings", older)("expandable_segments:True")


def _load_model(config: ModelConfig, base: str, device: torch.device, dtype: torch.dtype, seed: int) -> Any:
    """Returns the model by transformers, its adapter by peft."""
    import transformers

    _hide_progress_bars()
    few_bits: dict[str, Any] = {}
    if config.quantize is not None:
        require_bitsandbytes()
        few_bits = {"quantization_config": quantization_settings(dtype), "device_map": {"": device}}
    made: Any = transformers.AutoModelForCausalLM.from_pretrained(
        base, dtype=dtype, use_safetensors=True, trust_remote_code=False, output_loading_info=True, **few_bits
    )
    model, found = made
    _check_complete(found)
    keep_layout(model)
    if config.lora is not None:
        model = add_adapter(model, config.lora, seed)
    return model if is_quantized(model) else model.to(device)


def _spare_collector(*, has_transformers: bool, has_adapter: bool) -> None:
    """Excludes the 460,000 objects of the imported libraries from garbage collection.

    A full collection stops every thread, event loops too. It takes 0.35 s with these objects and 0.02 s without.
    """
    if has_transformers:
        import transformers  # noqa: F401
    if has_transformers and has_adapter:
        import peft  # noqa: F401
    if gc.get_freeze_count() == 0:  # only once, because later objects may have to be collected
        gc.freeze()


def _check_complete(found: dict[str, Any]) -> None:
    """Raises ValueError: the files lack tensors. transformers would draw those at random, with only a warning.

    `found` is transformers' report of the loading. Files may hold more than the model needs: a head for another task.
    """
    if missing := sorted(found.get("missing_keys") or ()):
        raise ValueError(
            f"config.json and the weights do not fit: {len(missing)} tensors are missing, first {missing[0]}"
        )
    if unused := sorted(found.get("unexpected_keys") or ()):
        log.warning("the base model's files hold %d tensors that it does not use, first %s", len(unused), unused[0])


def load_tokenizer(base: str) -> Any:
    """Returns the tokenizer at `base`. Its chat template is one text or None."""
    import transformers

    _hide_progress_bars()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(base, trust_remote_code=False)
        tokenizer.chat_template = one_template(tokenizer.chat_template)
    except Exception as error:  # the boundary to transformers and tokenizers, which raise plain Exceptions as well
        raise ValueError(f"its tokenizer (tokenizer.json, tokenizer_config.json): {one_line(error)}") from error
    return tokenizer


def one_template(template: str | Mapping[str, str] | None) -> str | None:
    """Returns a tokenizer's chat template as one text that chooses as transformers does.

    Hermes 3, Command R and Mistral 7B v0.3 have named templates: `tool_use` for conversations with tools, and
    `default`. Other names are never chosen. A byte order mark in front is no part of a template.
    """
    if template is None or isinstance(template, str):
        return template and template.removeprefix("\ufeff")
    texts = {name: text.removeprefix("\ufeff").removesuffix("\n") for name, text in template.items()}
    default, tools = texts.get("default"), texts.get("tool_use")
    if default is None or tools is None:
        return default or tools
    return f"{{%+ if tools +%}}{tools}{{%+ else +%}}{default}{{%+ endif +%}}"  # + keeps the white space at its side


def configs_of(base: str) -> list[Any]:
    """Returns the base's generation configuration, where it has one, and its model configuration."""
    import transformers

    found: list[Any] = [transformers.AutoConfig.from_pretrained(base, trust_remote_code=False)]
    with contextlib.suppress(OSError):  # it has none
        found.insert(0, transformers.GenerationConfig.from_pretrained(base))
    return found


def stop_ids(tokenizer: Any, *configs: Any) -> list[int]:
    """Returns the tokens that end a reply, by a tokenizer, a generation configuration and a model's.

    Where none of them ends a turn of the chat template, its first control token behind a reply is one too: a base model
    ends texts with <|endoftext|>, and a template that it is given ends turns with <|im_end|>.
    """
    found, marks = eos_ids(tokenizer, *configs), _turn_end(tokenizer)
    return sorted(found if not found.isdisjoint(marks) else {*found, *marks[:1]})


def eos_ids(*owners: Any) -> set[int]:
    """Returns the ends of text that tokenizers and configurations name."""
    found: set[int] = set()
    for owner in owners:
        ids = getattr(owner, "eos_token_id", None)
        found.update([] if ids is None else ids if isinstance(ids, list) else [ids])
    return found


def _turn_end(tokenizer: Any) -> list[int]:
    """Returns the control tokens that the chat template writes behind a reply; none if it refuses so short a talk."""
    reply = "fourteen"
    talk = [{"role": "user", "content": "7 + 7"}, {"role": "assistant", "content": reply}]
    try:
        _, is_there, end = tokenizer.apply_chat_template(talk, tokenize=False).rpartition(reply)
        ids = tokenizer(end, add_special_tokens=False).input_ids if is_there else []
    except Exception:  # the boundary to the model's own template; a tokenizer of a base model has none
        return []
    added = tokenizer.added_tokens_decoder
    return [id for id in ids if id in added and added[id].special]


def template_cure(tokenizer: Any) -> str:
    """Returns what to name as the chat template, for a tokenizer without one or with one that leaves out the tools."""
    speaks = {"<|im_start|>", "<|im_end|>"} <= tokenizer.get_vocab().keys()
    return "name 'builtin' (ChatML with tools, which this model speaks)" if speaks else "name a Jinja file"


def require_base(base: str, named: str | None) -> None:
    """Raises ArtError: the directory has a damaged file, or the hub has nothing of that name."""
    if problem := gguf_problem(Path(base)):
        raise UsageError(f"{named or 'model.base'}: {problem}")
    if Path(base).is_dir():
        check_base(Path(base), named)
    else:
        _find_on_hub(base, named)


@contextlib.contextmanager
def loading(base: str, named: str | None) -> Iterator[None]:
    """The boundary to the libraries that load a base model: what they raise becomes a UsageError."""
    try:
        yield
    except ArtError:
        raise
    except Exception as error:
        name = named or f"model.base: cannot load {base!r} (hub id, directory or file.py:function)"
        raise UsageError(f"{name}{' cannot be loaded' if named else ''}: {one_line(error)}") from error


@contextlib.contextmanager
def fitting(place: Path) -> Iterator[None]:
    """The boundary to the libraries that load a checkpoint: what they raise becomes a CheckpointError."""
    try:
        yield
    except ArtError:
        raise
    except Exception as error:
        raise CheckpointError(f"{place}: does not fit this model: {one_line(error)}") from error


def _find_on_hub(base: str, named: str | None) -> None:
    """Asks the hub once, unless the base is in the cache, because loading would retry for minutes."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        if isinstance(huggingface_hub.try_to_load_from_cache(base, "config.json"), str):
            return
        huggingface_hub.HfApi().model_info(base, timeout=HUB_TIMEOUT_S)
    except Exception as error:  # the boundary to the hub's client: a bad id, no such model, no network
        summary = " ".join(str(error).split())[:200]
        what = named or f"model.base: {base!r}"
        kinds = "no directory here" if named else "no directory here, no file.py:function"
        if isinstance(error, HfHubHTTPError | HFValidationError):  # the hub answered, or was not asked
            raise UsageError(f"{what} is {kinds}, and not on the hub: {summary}") from error
        cure = "name a directory" if named else "without it a directory works, and builtin:tiny"
        raise UsageError(f"{what} is {kinds}, and the hub could not be reached ({summary}); {cure}") from error


def _hide_progress_bars() -> None:
    """Hides transformers' progress bars, which draw over ours."""
    import transformers

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def add_adapter(model: Any, lora: LoraConfig, seed: int) -> Any:
    """Returns the model with a fresh adapter. Raises UsageError: a module to adapt that it does not have."""
    import peft
    import torch

    config = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=lora.targets, lora_dropout=0.0, task_type="CAUSAL_LM"
    )
    with torch.random.fork_rng(devices=[]), _deprecations_hidden():
        torch.manual_seed(seed)
        try:
            return peft.get_peft_model(model, config)
        except ValueError as error:
            raise UsageError(f"model.lora.targets: {one_line(error)}") from error


def _wrap(model: Any, adapter: Path) -> Any:
    """Returns the model with an adapter of the saved one's shape, whose tensors are not loaded yet."""
    import peft
    import torch

    with fitting(adapter / "adapter_config.json"), torch.random.fork_rng(devices=[]), _deprecations_hidden():
        config: Any = peft.PeftConfig.from_pretrained(str(adapter))
        config.base_model_name_or_path = None  # the path of the base in training, which may be gone
        config.inference_mode = True
        # The tensors are set afterwards. These settings would compute others first, change the base, or import code.
        config.init_lora_weights, config.loftq_config, config.eva_config, config.corda_config = True, {}, None, None
        config.megatron_config, config.auto_mapping = None, None
        return peft.get_peft_model(model, config).eval()


@contextlib.contextmanager
def _deprecations_hidden() -> Iterator[None]:
    """Hides a warning: peft 0.21 uses a name that transformers 5.23 deprecates. Remove this when it does not."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        yield


def _parts(
    weights: Weights,
    tensors: dict[str, torch.Tensor],
    part: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Returns the part of each whole tensor that belongs in `weights`; a tensor that does not fit is left unchanged."""
    model = weights.model
    own: Any = model.state_dict()
    if weights.has_adapter:
        import peft

        own = peft.get_peft_model_state_dict(model)
    fits = {name for name, tensor in tensors.items() if name in own and own[name].shape == tensor.shape}
    return {name: part(tensor, own[name]) if name in fits else tensor for name, tensor in tensors.items()}


def _set_tensors(weights: Weights, tensors: dict[str, torch.Tensor]) -> None:
    """Raises an error, and changes no weight, if tensors are missing, or there are others."""
    if weights.has_adapter:
        _set_adapter(weights.model, tensors)
        return
    own: Any = weights.model.state_dict()
    tied = set(getattr(weights.model, "_tied_weights_keys", None) or [])
    wrong = [name for name in own if name not in tied and name not in tensors]
    _refuse(wrong + [name for name, tensor in tensors.items() if name not in own or own[name].shape != tensor.shape])
    weights.model.load_state_dict(tensors, strict=False)


def _set_adapter(model: Any, tensors: dict[str, torch.Tensor]) -> None:
    """As `_set_tensors`. peft tells what does not fit only after it has set the rest, which is then put back."""
    import peft
    import torch

    parameters = {name: parameter for name, parameter in model.named_parameters() if "lora_" in name}
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    try:
        result: Any = peft.set_peft_model_state_dict(model, tensors)
        _refuse(list(result.unexpected_keys) + [name for name in result.missing_keys if "lora_" in name])
    except BaseException:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(before[name])
        raise


def _refuse(wrong: Sequence[str]) -> None:
    """Raises ValueError if there is any name of a tensor that does not fit."""
    if wrong:
        raise ValueError(f"{len(wrong)} tensors do not match, first {wrong[0]}")
