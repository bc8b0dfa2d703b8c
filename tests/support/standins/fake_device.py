"""A GPU that is not there: a device made in Python, on which tensors have shapes and no numbers.

    with FakeDevice() as device:
        weights = fake_weights(config, rank=16, device=device)
        ...                          # a learner's whole step, at any size, without memory
    device.peak, device.waits

Tensors on the device are torch's FakeTensors. A tensor of the CPU beside one of the device is an error, as on a GPU;
those of the CPU are real. The device counts the bytes of living storages, in blocks of 512 as CUDA's allocator does,
and records each place in our code where the host waits for the device. Numbers that the host reads are 0, or False.

What it cannot show: kernels (their workspace, what they compute), fragments, and the order of streams.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _DummyPrivateUse1Hook,
    _setup_privateuseone_for_python_backend,
)
from transformers import AutoModelForCausalLM
from transformers.integrations.bitsandbytes import replace_with_bnb_linear

from art_cli.config.schema import LoraConfig
from art_cli.models.adapters import add_adapter
from art_cli.models.precision import quantization_settings
from art_cli.models.weights import Weights
from tests.support.models.tiny import tiny_tokenizer

NAME = "gpux"
BLOCK = 512  # bytes: CUDA's allocator rounds each tensor up to them
aten = torch.ops.aten


class _Module(_DummyBackendModule):
    """torch.gpux, whose device is there only inside a FakeDevice: the rest of the process has none."""

    num_devices = 0

    def is_available(self) -> bool:
        return self.num_devices > 0

    def device_count(self) -> int:
        return self.num_devices

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def get_rng_state(self, *device: Any) -> Tensor:
        return torch.zeros(0, dtype=torch.uint8)

    def set_rng_state(self, *state: Any) -> None:
        pass


class _Hook(_DummyPrivateUse1Hook):
    def is_available(self) -> bool:
        return _Module.num_devices > 0


def _register() -> None:
    """Makes torch know the device; once in a process, and for all of it."""
    if torch._C._get_privateuse1_backend_name() != NAME:
        _setup_privateuseone_for_python_backend(NAME, backend_module=_Module(), hook=_Hook())


class FakeDevice(TorchDispatchMode):
    """Use as a context. Inside, tensors on `device` are fake; `to_device` makes a parameter of one on `meta`."""

    def __init__(self) -> None:
        super().__init__()
        _register()
        self.device = torch.device(NAME, 0)
        self.fake = FakeTensorMode(allow_non_fake_inputs=False)
        self.now = self.peak = 0  # bytes of living storages
        self.peak_at = ""  # place of the peak, as in `waits`
        self.waits: Counter[str] = Counter()  # "learners/optimizer.py:clip item" -> times
        self._living: dict[int, weakref.ref[Any]] = {}

    def __enter__(self) -> "FakeDevice":
        _Module.num_devices = 1
        # torch.tensor(numbers, device=...) makes a tensor of the CPU then, and its move is seen here
        self._lifts = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        self._threads = torch.autograd.set_multithreading_enabled(False)  # the engine's threads do not know the device
        self._threads.__enter__()
        self._tolist = mock.patch.object(FakeTensor, "tolist", lambda tensor: tensor.cpu().tolist())
        self._tolist.start()
        return super().__enter__()

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)
        self._tolist.stop()
        self._threads.__exit__(*failure)
        torch._C._set_only_lift_cpu_tensors(self._lifts)
        _Module.num_devices = 0

    def forget(self) -> None:
        """Begins another measurement."""
        self.peak = self.now
        self.waits.clear()

    def empty(self, *shape: int, stride: Sequence[int] | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns a tensor of that shape on the device."""
        with self.fake:
            made = torch.empty(shape, dtype=dtype, device=self.device)
            if stride is not None:
                made = torch.empty_strided(shape, stride, dtype=dtype, device=self.device)
        self._count(made)
        return made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return func(*args)
        kwargs = kwargs or {}
        tensors = [leaf for leaf in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(leaf, Tensor)]
        target = kwargs.get("device")
        is_fake = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if not is_fake and (target is None or torch.device(target).type != NAME):
            return func(*args, **kwargs)
        if (found := self._moved(func, args, kwargs, is_fake)) is not None:
            return found
        with self.fake:
            if not all(isinstance(tensor, FakeTensor) for tensor in tensors):
                args, kwargs = pytree.tree_map_only(Tensor, self._joined, (args, kwargs))
            out = func(*args, **kwargs)
        for tensor in pytree.tree_leaves(out):
            if isinstance(tensor, FakeTensor):
                self._count(tensor)
        return out

    def _joined(self, tensor: Tensor) -> Tensor:
        """Returns an input as the device takes it: of the CPU's tensors only single numbers."""
        if isinstance(tensor, FakeTensor):
            return tensor
        if tensor.dim() or tensor.device.type != "cpu":
            raise AssertionError(f"{_place()}: a tensor {list(tensor.shape)} of {tensor.device} beside one of {NAME}")
        return self.fake.from_tensor(tensor)

    def _moved(self, func: Any, args: Any, kwargs: Any, is_fake: bool) -> Any:
        """Returns the result of an operation that crosses between host and device, or whose size depends on numbers."""
        if func is aten._local_scalar_dense.default:
            self.waits[f"{_place()} item"] += 1
            return torch.zeros((), dtype=args[0].dtype).item()
        if func is aten._to_copy.default:
            device = kwargs.get("device")
            if is_fake and device is not None and torch.device(device).type == "cpu":
                self.waits[f"{_place()} to the host"] += 1
                return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
            if not is_fake:
                source = args[0]
                return self.empty(*source.shape, stride=source.stride(), dtype=kwargs.get("dtype") or source.dtype)
        if func is aten.copy_.default:
            into, source = args[0], args[1]
            if isinstance(into, FakeTensor) and not isinstance(source, FakeTensor) and source.device.type == "cpu":
                return into
            if not isinstance(into, FakeTensor):
                self.waits[f"{_place()} to the host"] += 1
                return into.zero_()
        if func is aten.nonzero.default:
            self.waits[f"{_place()} nonzero"] += 1
            return self.empty(args[0].numel(), args[0].dim(), dtype=torch.int64)
        if func is aten.equal.default:
            self.waits[f"{_place()} equal"] += 1
            return True
        if func in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default):
            return self._by_mask(func, args, kwargs)
        if func is aten.masked_select.default:
            self.waits[f"{_place()} masked_select"] += 1
            return self.empty(args[0].numel(), dtype=args[0].dtype)
        if func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
            raise AssertionError(f"{_place()}: repeat_interleave waits for the device: give output_size")
        return None

    def _by_mask(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Returns what indexing gives by a mask, all of which is taken for True; None for other indices."""
        indices = args[1]
        if not any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
            return None
        self.waits[f"{_place()} index by a mask"] += 1
        if func is not aten.index.Tensor:
            return args[0]
        found: list[Tensor | None] = []
        for index in indices:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                found += [self.empty(index.numel(), dtype=torch.int64)] * index.dim()
            else:
                found.append(index)
        with self.fake:
            picked = func(args[0], found, **kwargs)
        self._count(picked)
        return picked

    def _count(self, tensor: Tensor) -> None:
        if tensor.device.type != NAME:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._living:
            return
        size = -(-storage.nbytes() // BLOCK) * BLOCK

        def end(_: Any, key: int = key, size: int = size) -> None:
            self._living.pop(key, None)
            self.now -= size

        self._living[key] = weakref.ref(storage, end)
        self.now += size
        if self.now > self.peak:
            self.peak, self.peak_at = self.now, _place()


def _place() -> str:
    """Returns the innermost function of our package that is running, or of another one but torch where none is."""
    frame, other = sys._getframe(1), ""
    while frame is not None:
        parts = Path(frame.f_code.co_filename).parts
        place = f"{'/'.join(parts[-2:])}:{frame.f_code.co_name}"
        if "art_cli" in parts:
            return place
        if not other and not {"torch", "fake_device.py", "contextlib.py"} & set(parts):
            other = place
        frame = frame.f_back  # type: ignore[assignment]
    return other


def fake_weights(config: Any, device: FakeDevice, *, is_4bit: bool = False, rank: int | None = 16) -> Weights:
    """Returns a policy of a transformers configuration on the device, in bfloat16, with a fresh adapter of `rank`.

    With `is_4bit` its linear layers are bitsandbytes', quantized as `model.quantize: 4bit` does.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if is_4bit:
        replace_with_bnb_linear(model, ["lm_head"], quantization_settings(torch.bfloat16))
        for module in model.modules():
            if type(module).__name__ == "Linear4bit":
                module.weight = _quantized(module, device)
        model.is_loaded_in_4bit = model.is_quantized = True
    with torch.device("meta"):
        if rank is not None:
            model = add_adapter(model, LoraConfig(rank=rank), seed=0)
    put_on(model, device)
    length, has_adapter = config.max_position_embeddings, rank is not None
    quantize = "4bit" if is_4bit else None
    weights = Weights(model.eval(), tiny_tokenizer(), device.device, torch.bfloat16, length, "", has_adapter)
    return replace(weights, quantize=quantize)


def _quantized(layer: Any, device: FakeDevice) -> Any:
    """Returns a linear layer's weight in 4 bits with double quantization, with what a Params4bit has."""
    from bitsandbytes.functional import QuantState, create_dynamic_map

    num, blocks = layer.weight.numel(), -(-layer.weight.numel() // 64)
    state = QuantState(
        device.empty(blocks, dtype=torch.uint8),
        shape=layer.weight.shape,
        code=device.empty(16),
        blocksize=64,
        quant_type="nf4",
        dtype=torch.bfloat16,
        offset=device.empty(),
        state2=QuantState(
            device.empty(-(-blocks // 256)),
            code=create_dynamic_map().to(device.device),
            blocksize=256,
            dtype=torch.float32,
        ),
    )
    weight: Any = torch.nn.Parameter(device.empty(num // 2, 1, dtype=torch.uint8), requires_grad=False)
    weight.quant_state, weight.quant_type, weight.compress_statistics = state, "nf4", True  # as a Params4bit has them
    weight.quant_storage, weight.bnb_quantized = torch.uint8, True
    return weight


def put_on(model: torch.nn.Module, device: FakeDevice) -> None:
    """Replaces each parameter and buffer, which are on `meta`, by a tensor on the device. Tied ones stay tied."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for kind in (module._parameters, module._buffers):
            for name, tensor in kind.items():
                if tensor is None or isinstance(tensor, FakeTensor):
                    continue
                if id(tensor) not in made:
                    new = device.empty(*tensor.shape, dtype=tensor.dtype)
                    is_parameter = isinstance(tensor, torch.nn.Parameter)
                    made[id(tensor)] = torch.nn.Parameter(new, tensor.requires_grad) if is_parameter else new
                kind[name] = made[id(tensor)]


class FusedAttention(torch.autograd.Function):
    """What torch's compiled flex_attention keeps and makes (torch._higher_order_ops.flex_attention): no scores."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty(*query.shape[:3], value.shape[3])
        sums = query.new_empty(query.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        query, key, value, _, sums = ctx.saved_tensors
        dots = torch.empty_like(sums)  # of the result and its gradient, for each query
        grads = tuple(map(torch.empty_like, (query, key, value)))
        del dots
        return grads


def fused(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
    """A kernel for FlexAttention on the device."""
    out: Tensor = FusedAttention.apply(query, key, value)
    return out
