"""Estimates a run's GPU memory from its model's sizes, and decides what follows from it.

    ModelSize and the run's division between GPUs -> RunMemory -> vLLM's share of the GPU, the capacity of its cache,
    the number of tokens from which activations are recomputed, and why a run does not fit

Nothing here looks at a GPU. Free memory depends on other programs, and a run should be decided the same way on a busy
machine as on a quiet one. Only vLLM's start measures memory (engines/vllm/arguments.py), also using `share`.

torch and transformers are imported inside functions only.
"""

from typing import Any, NamedTuple

GIB = 2.0**30
GPU_TOKENS = 8192  # default pack length on a GPU
MAX_SHARE = 0.9  # on a GPU used by vLLM alone
# On a GPU without a learner. If less is free, vLLM refuses to start before it loads weights, so that it takes no memory
# from the programs there, such as another server's vLLM.
LEAST_SHARE = 0.3
BESIDE_SHARE = 0.45  # on a GPU whose learner works concurrently, if its steps' memory is unknown
CONTEXT = 0.5 * GIB  # CUDA's kernels and stack, per process and GPU (an estimate)
RESERVE = 1.0 * GIB  # for growth after vLLM has taken its share: NCCL, fragments (an estimate)
# vLLM's needs apart from weights, adapters, keys and values: activations for a batch of 8,192 prompt tokens, logits for
# all sequences, CUDA graphs (an estimate). ASLEEP remains on the GPU during sleep.
ENGINE_WORK, ASLEEP = 2.0 * GIB, 1.5 * GIB
LOGITS = 1.5 * GIB  # a chunk of 2^27 logits in float32, with softmax and gradient (learners/packs/logprobs.py)
MOVED = 8  # layer widths held during a backward pass, apart from kept activations: gradients and products
FOUR_BITS = 0.516  # bytes per weight in NF4 with double quantization: 4.127 bits (Dettmers et al. 2023, section 3)
ADAPTERS = 2  # vLLM's adapter slots (engines/vllm/arguments.py MAX_LORAS)


class ModelSize(NamedTuple):
    """Example for Qwen3-4B: ModelSize(parameters=4_022_468_096, cached_per_token=73_728, linear=3_633_315_840,
    lora_per_rank=2_064_384, kept_per_token=39_936, layers=36, hidden=2560, intermediate=9728, experts=0)"""

    parameters: int
    cached_per_token: int  # keys and values per token in all layers
    linear: int  # weights in all linear layers except the head; 4 bits apply to these
    lora_per_rank: int  # weights per rank in an adapter on all linear layers
    # numbers per token and layer kept for the backward pass (decoder/layers.py), without adapters
    kept_per_token: int
    layers: int
    hidden: int
    intermediate: int
    experts: int = 0  # number of experts; 0 without a mixture of experts

    def weight_bytes(self, element: float, *, is_4bit: bool) -> float:
        return self.linear * (FOUR_BITS if is_4bit else element) + (self.parameters - self.linear) * element


def model_size(base: str) -> ModelSize:
    """Returns the size of the model at `base` (a hub id or directory) without reading its weights.

    Raises OSError or ValueError if transformers does not know the model.
    """
    import transformers

    return size_of(transformers.AutoConfig.from_pretrained(base, trust_remote_code=False))


def model_bytes(base: str, *, is_judge: bool) -> float:
    """Returns the bytes of a teacher, or of a reward model as judge, in its files' dtype. Raises like `model_size`."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(base, trust_remote_code=False)
    auto = transformers.AutoModelForSequenceClassification if is_judge else transformers.AutoModelForCausalLM
    return float(empty_model(config, auto).num_parameters() * (config.dtype or torch.float32).itemsize)


def size_of(config: Any) -> ModelSize:
    """Returns the model size for a transformers configuration."""
    model, text = empty_model(config), config.get_text_config()
    linear = [*linear_modules(model).values()]
    heads, hidden = text.num_attention_heads, text.hidden_size
    width = getattr(text, "head_dim", None) or hidden // heads
    queries, keys = heads * width, (getattr(text, "num_key_value_heads", None) or heads) * width
    chosen = (getattr(text, "num_experts_per_tok", None) or 0) * (getattr(text, "moe_intermediate_size", None) or 0)
    intermediate = chosen or getattr(text, "intermediate_size", None) or 4 * hidden
    has_head_norms = any(name.endswith("q_norm") for name, _ in model.named_modules())
    # the layer's input, heads before and after their norms, attention output, middle, gate and up
    kept = hidden + (queries + keys) * has_head_norms + (queries + 2 * keys) + queries + hidden + 2 * intermediate
    return ModelSize(
        parameters=model.num_parameters(),
        cached_per_token=2 * text.num_hidden_layers * keys,
        linear=sum(each.weight.numel() for each in linear),
        lora_per_rank=sum(each.in_features + each.out_features for each in linear),
        kept_per_token=kept,
        layers=text.num_hidden_layers,
        hidden=hidden,
        intermediate=intermediate,
        experts=num_experts(config),
    )


def empty_model(config: Any, auto: Any = None) -> Any:
    """Returns a model of this transformers configuration, without weights. `auto` is the class, if no causal LM."""
    import torch
    import transformers

    auto = auto or transformers.AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(config)


def linear_modules(model: Any) -> dict[str, Any]:
    """Returns the model's linear modules by name, without the head."""
    import torch

    head = model.get_output_embeddings()
    return {
        name: each for name, each in model.named_modules() if isinstance(each, torch.nn.Linear) and each is not head
    }


def num_experts(config: Any) -> int:
    """Returns the number of experts; 0 without a mixture of experts."""
    text = config.get_text_config()
    return getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 0


class RunMemory(NamedTuple):
    """A run's memory on one GPU, in bytes. Example: Qwen3-4B with vLLM and learner on the same GPU and rows of 8,192
    tokens has RunMemory(8.6e9, 4.9e9, 2.9e6, 1.0e10, 1.5e5, is_beside=False)"""

    # permanent: weights, adapter, AdamW's state and other models; 0 if the learner uses other GPUs
    learner: float
    step: float  # peak of an update on top of that, if activations are recomputed
    kept: float  # activations per token kept for the backward pass, if not recomputed
    engine: float  # vLLM's weights, adapters and work space; 0 without vLLM
    cached: float  # keys and values per token in vLLM's cache
    is_beside: bool  # whether vLLM samples while the learner works, instead of sleeping
    others: float = 0.0  # part of `learner`: a local teacher's weights, and those of reward models as judges


def run_memory(
    size: ModelSize,
    *,
    element: float,
    is_4bit: bool,
    rank: int | None,
    tokens: int,
    learners: int = 1,
    engines: int = 1,
    is_beside: bool = False,
    is_offloaded: bool = False,
    others: float = 0.0,
) -> RunMemory:
    """Returns a run's memory for passes of up to `tokens` tokens with `element` bytes per number.

    `rank` is the adapter's rank; None trains all weights. `learners` and `engines` count the GPUs holding one copy of
    the model; 0 means other GPUs. `is_offloaded` means that the optimizer works on the CPU.
    """
    weights, adapter = size.weight_bytes(element, is_4bit=is_4bit), (rank or 0) * size.lora_per_rank
    trained = training_bytes(element, is_offloaded=is_offloaded) * size.parameters if rank is None else 0.0
    trained += (4 + training_bytes(4, is_offloaded=is_offloaded)) * adapter  # adapters are float32
    kept = element * (size.layers * (size.kept_per_token + 7 * (rank or 0)))
    moved = size.layers * size.hidden + size.kept_per_token + MOVED * (size.intermediate + size.hidden)
    engine = (weights + ADAPTERS * element * adapter) / engines + ENGINE_WORK if engines else 0.0
    return RunMemory(
        learner=(weights + trained) / learners + others if learners else 0.0,
        step=tokens * element * moved + LOGITS if learners else 0.0,
        kept=kept,
        engine=engine,
        cached=element * size.cached_per_token / max(engines, 1),
        is_beside=is_beside,
        others=others if learners else 0.0,
    )


def training_bytes(element: float, *, is_offloaded: bool) -> float:
    """Returns the bytes of GPU memory per trained weight of `element` bytes, apart from the weight.

    These are the gradient, AdamW's two moments and the weight before the newest update (`train.max_kl`). A weight below
    float32 also has a float32 copy with its gradient (learners/optimizer.py).
    """
    return element if is_offloaded else element + 12 + (8 if element < 4 else 0)


def share(total: float, free: float) -> float:
    """Returns vLLM's share of a GPU, rounded down. vLLM refuses to start if the share exceeds free memory."""
    return max(int(1000 * min(MAX_SHARE, (free - RESERVE) / total)), 0) / 1000


def expected_share(total: float, run: RunMemory) -> float:
    """Returns the share expected at vLLM's start, leaving room for a concurrent step if necessary."""
    processes = 2 if run.learner else 1
    return share(total, total - run.learner - processes * CONTEXT - (run.step if run.is_beside else 0.0))


def cache_tokens(total: float, run: RunMemory, share: float) -> int:
    """Returns vLLM's cache capacity in tokens, negative if not even its weights fit."""
    return int((share * total - run.engine) // run.cached)


def checkpoint_from(total: float, run: RunMemory) -> int:
    """Returns the number of tokens per forward pass from which activations are recomputed instead of kept.

    Up to this number, kept activations fill at most half of the learner's free memory; the other half is for everything
    else. Returns 1 if vLLM occupies the memory for activations, or nothing is free.
    """
    free = total - run.learner - CONTEXT - (ASLEEP if run.engine else 0.0)
    return 1 if run.is_beside else max(int(0.5 * free // run.kept), 1)


def misfit(total: float, run: RunMemory, *, share: float, max_length: int) -> str:
    """Returns the reason why the run does not fit on a GPU with this many bytes; "" if it fits by these estimates."""
    if run.learner and run.learner + run.step + CONTEXT + (0 if run.is_beside or not run.engine else ASLEEP) > total:
        others = f", beside {run.others / GIB:.1f} GiB of a local teacher or judge" if run.others else ""
        own = run.learner - run.others
        need = f"the learner's weights take {own / GIB:.1f} GiB and a step {run.step / GIB:.1f}"
        return f"{need}{others}, of a GPU of {total / GIB:.1f} GiB"
    if run.engine and (tokens := cache_tokens(total, run, share)) < max_length:
        there = f"its share of the GPU, {share:.2f} of {total / GIB:.1f} GiB"
        if tokens < 1:
            return f"vLLM needs {run.engine / GIB:.1f} GiB for its weights and work, which {there}, does not hold"
        return f"vLLM's cache holds {tokens:,} tokens in {there}, and model.max_length is {max_length:,}"
    return ""
