"""The memory that a run takes of a GPU, estimated from the sizes of its model, and what follows from it.

    ModelSize, and how the run divides it -> RunMemory -> vLLM's share of the GPU, the tokens that its cache holds, the
    tokens from which activations are computed again, and why a run does not fit

Nothing here looks at a GPU. What is free at the moment depends on other programs, and a run is to be decided alike on a
busy machine and on a quiet one. Only the start of vLLM measures (engines/vllm/arguments.py), by `share` as well.

torch and transformers are imported inside functions only.
"""

from typing import Any, NamedTuple

GIB = 2.0**30
GPU_TOKENS = 8192  # of a pack on a GPU, where the configuration names no other number
MAX_SHARE = 0.9  # of a GPU that only vLLM uses
BESIDE_SHARE = 0.45  # of a GPU whose learner works at the same time, where nothing is known of its steps
CONTEXT = 0.5 * GIB  # kernels and stack that CUDA keeps for each process on a GPU (an estimate)
RESERVE = 1.0 * GIB  # for what grows after vLLM has taken its share: NCCL, AdamW's state, fragments (an estimate)
# What vLLM needs in its share besides weights, adapters, keys and values: the activations of a batch of 8,192 prompt
# tokens, logits of all sequences, CUDA graphs (an estimate), and what of it stays on the GPU while vLLM sleeps.
ENGINE_WORK, ASLEEP = 2.0 * GIB, 1.5 * GIB
LOGITS = 1.5 * GIB  # one chunk of 2^27 logits in float32, its softmax and its gradient (learners/packs/logprobs.py)
MOVED = 8  # widths of a layer that its backward pass holds at once, besides what it kept: gradients and products
TRAINED = 16  # bytes of a trained weight in float32 with its gradient and AdamW's two moments
FOUR_BITS = 0.516  # bytes of a weight in NF4 with double quantization: 4.127 bits (Dettmers et al. 2023, section 3)
ADAPTERS = 2  # adapters that vLLM has room for (engines/vllm/arguments.py MAX_LORAS)


class ModelSize(NamedTuple):
    """Example: of Qwen3-4B ModelSize(parameters=4_022_468_096, cached_per_token=73_728, linear=3_633_315_840,
    lora_per_rank=2_064_384, kept_per_token=39_936, layers=36, hidden=2560, intermediate=9728, experts=0)"""

    parameters: int
    cached_per_token: int  # keys and values that a token keeps in all layers
    linear: int  # weights of all linear layers but the head, which 4 bits are for
    lora_per_rank: int  # weights that each rank of an adapter on all of these has
    kept_per_token: (
        int  # numbers that a token keeps in one layer for the backward pass (decoder/layers.py), adapters apart
    )
    layers: int
    hidden: int
    intermediate: int
    experts: int = 0  # of a mixture of experts; 0: it is none

    def weight_bytes(self, element: float, *, is_4bit: bool) -> float:
        return self.linear * (FOUR_BITS if is_4bit else element) + (self.parameters - self.linear) * element


def model_size(base: str) -> ModelSize:
    """Returns the size of the model at `base` (a hub id or directory) without reading its weights.

    Raises OSError, ValueError: transformers knows no model there.
    """
    import transformers

    return size_of(transformers.AutoConfig.from_pretrained(base, trust_remote_code=False))


def size_of(config: Any) -> ModelSize:
    """Returns the size of the model of a transformers configuration."""
    import torch
    import transformers

    auto: Any = transformers.AutoModelForCausalLM  # untyped there
    with torch.device("meta"):
        model = auto.from_config(config)
    head, text = model.get_output_embeddings(), config.get_text_config()
    linear = [each for each in model.modules() if isinstance(each, torch.nn.Linear) and each is not head]
    heads, hidden = text.num_attention_heads, text.hidden_size
    width = getattr(text, "head_dim", None) or hidden // heads
    queries, keys = heads * width, (getattr(text, "num_key_value_heads", None) or heads) * width
    chosen = (getattr(text, "num_experts_per_tok", None) or 0) * (getattr(text, "moe_intermediate_size", None) or 0)
    intermediate = chosen or getattr(text, "intermediate_size", None) or 4 * hidden
    has_head_norms = any(name.endswith("q_norm") for name, _ in model.named_modules())
    # the layer's input, the heads before their norms and after them, their result, the middle, gate and up
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
        experts=getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 0,
    )


class RunMemory(NamedTuple):
    """What a run takes of one GPU, in bytes. Example: of Qwen3-4B on one GPU that vLLM and the learner share, with
    rows of 8,192 tokens, RunMemory(8.6e9, 4.9e9, 2.9e6, 1.0e10, 1.5e5, is_beside=False)"""

    learner: float  # weights, adapter and AdamW's state, all the time; 0 if the learner is on no GPU of vLLM's
    step: float  # the most that an update takes besides, where activations are computed again
    kept: float  # activations that a token keeps for the backward pass where they are not
    engine: float  # vLLM's weights, adapters and work space; 0: there is no vLLM
    cached: float  # keys and values of a token in vLLM's cache
    is_beside: bool  # vLLM samples while the learner works, instead of sleeping


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
) -> RunMemory:
    """Returns the memory of a run whose longest pass has `tokens` tokens of `element` bytes a number.

    `rank` is the adapter's, or None if all weights are trained. `learners` and `engines` are the GPUs that one copy of
    the model is divided between; 0: that part is on other GPUs.
    """
    weights, adapter = size.weight_bytes(element, is_4bit=is_4bit), (rank or 0) * size.lora_per_rank
    trained = (TRAINED - element) * size.parameters if rank is None else TRAINED * adapter
    kept = element * (size.layers * (size.kept_per_token + 7 * (rank or 0)))
    moved = size.layers * size.hidden + size.kept_per_token + MOVED * (size.intermediate + size.hidden)
    engine = (weights + ADAPTERS * element * adapter) / engines + ENGINE_WORK if engines else 0.0
    return RunMemory(
        learner=(weights + trained) / learners if learners else 0.0,
        step=tokens * element * moved + LOGITS if learners else 0.0,
        kept=kept,
        engine=engine,
        cached=element * size.cached_per_token / max(engines, 1),
        is_beside=is_beside,
    )


def share(total: float, free: float) -> float:
    """Returns the share of a GPU that vLLM may take, rounded down. vLLM refuses to start with more than is free."""
    return max(int(1000 * min(MAX_SHARE, (free - RESERVE) / total)), 0) / 1000


def expected_share(total: float, run: RunMemory) -> float:
    """Returns the share that will be measured when vLLM starts, with room for a step beside it if there is one."""
    processes = 2 if run.learner else 1
    return share(total, total - run.learner - processes * CONTEXT - (run.step if run.is_beside else 0.0))


def cache_tokens(total: float, run: RunMemory, share: float) -> int:
    """Returns the number of tokens whose keys and values vLLM's cache holds, negative if not even its weights fit."""
    return int((share * total - run.engine) // run.cached)


def checkpoint_from(total: float, run: RunMemory) -> int:
    """Returns the number of tokens in a forward pass from which activations are computed again instead of kept.

    It is the number that keeps half of what is free while the learner works; the other half is for all the rest. It is
    1 where vLLM has what an update would keep, or nothing is free.
    """
    free = total - run.learner - CONTEXT - (ASLEEP if run.engine else 0.0)
    return 1 if run.is_beside else max(int(0.5 * free // run.kept), 1)


def misfit(total: float, run: RunMemory, *, share: float, max_length: int) -> str:
    """Returns the reason why the run does not fit on a GPU of that many bytes, or "" if it does by these estimates."""
    if run.learner and run.learner + run.step + CONTEXT + (0 if run.is_beside or not run.engine else ASLEEP) > total:
        need = f"the learner's weights take {run.learner / GIB:.1f} GiB and a step {run.step / GIB:.1f}"
        return f"{need}, of a GPU of {total / GIB:.1f} GiB"
    if run.engine and (tokens := cache_tokens(total, run, share)) < max_length:
        there = f"its share of the GPU, {share:.2f} of {total / GIB:.1f} GiB"
        if tokens < 1:
            return f"vLLM needs {run.engine / GIB:.1f} GiB for its weights and work, which {there}, does not hold"
        return f"vLLM's cache holds {tokens:,} tokens in {there}, and model.max_length is {max_length:,}"
    return ""
