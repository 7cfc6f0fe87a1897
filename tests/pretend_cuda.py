"""A CUDA device for machines without one: its tensors say `cuda:0` and compute on the CPU.

    with PretendCuda() as device:
        x = torch.ones(3, device="cuda")

Within the block, code for a GPU runs unchanged, and what would fail on a GPU fails here: an
operator whose tensors are on both devices raises, and so does a copy between host and device, or a
wait for the device, during a graph capture. Outside a capture, copies and waits are recorded in
`device.events`, with their ranges and their line in sage_fast. A captured graph is the list of its
operators: a replay runs them again on the same memory, without Python. Numbers come from the CPU's
operators, so they can be compared bit for bit.

It sees races between streams only over memory that an asynchronous copy from the host fills
(`Order`). It cannot see memory that is freed too early, or kernels (tests/ops runs Triton's).
Within the block, every backward pass counts as one on the device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor
from torch.utils import cpp_extension
from torch.utils._python_dispatch import TorchDispatchMode

import sage_fast
from sage_fast.util import profiling

CUDA, HOST = torch.device("cuda", 0), torch.device("cpu")
PACKAGE = str(Path(sage_fast.__file__).parent)
aten = torch.ops.aten

WAITS = {
    aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten.unique_dim,
    aten._unique2,
    aten.unique_consecutive, aten.bincount,
}  # fmt: skip
"""Operators whose result, or its shape, the host has to read."""
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}


@dataclasses.dataclass(frozen=True)
class Event:
    """A copy by the host, or a wait for the device.

    Attributes:
        kind: `copy to device`, `copy to host` or `wait`; after `asynchronous` the host does not
            wait for the copy.
        what: the operator or function.
        ranges: names of `sage_fast.util.profiling` around it, the outermost first.
        place: innermost line of sage_fast, such as `trainer.py:120`.
    """

    kind: str
    what: str
    ranges: tuple[str, ...]
    place: str

    @property
    def waits(self) -> bool:
        """Whether the host waits until the device has finished all earlier work."""
        return not self.kind.startswith("asynchronous")


class CudaTensor(Tensor):
    """A tensor that says `cuda:0`; its numbers are in `host`, a CPU tensor.

    C++ believes that it is on the CPU: without CUDA, autograd has no queue for another device. The
    attributes and methods that ask C++ for the device before any operator is dispatched are
    therefore overridden here.
    """

    host: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: Tensor) -> CudaTensor:
        layout = {
            "strides": host.stride(),
            "storage_offset": host.storage_offset(),
            "dtype": host.dtype,
        }
        tensor = Tensor._make_wrapper_subclass(cls, host.shape, **layout)
        tensor.host = host
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func}: a tensor of PretendCuda is used outside its block")

    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: CudaTensor) -> None:
        Tensor.data.__set__(self, value)
        self.host = value.host

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def record_stream(self, stream: Stream) -> None:
        pass

    def to(self, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
        device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None and device.type == "cpu":
            assert not (self.requires_grad and torch.is_grad_enabled()), (
                "a copy to the host that keeps its gradient"
            )
            _active().note("copy to host", "to")  # into new memory, which is not pinned
            _active().order.operator("to", [self], [])
            return self.host.to(dtype or self.dtype, copy=True)
        unchanged = dtype in (None, self.dtype) and (
            layout is None or self.is_contiguous(memory_format=layout)
        )
        return (
            self
            if unchanged and not copy
            else aten._to_copy(self, dtype=dtype, memory_format=layout)
        )

    def cpu(self, **kwargs: Any) -> Tensor:
        return self.to(HOST)

    def cuda(self, *args: Any, **kwargs: Any) -> Tensor:
        return self

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def new_tensor(self, data: Any, **kwargs: Any) -> Tensor:
        return torch.tensor(data, **{"dtype": self.dtype, "device": CUDA, **kwargs})

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = self.detach().clone()
        return (
            torch.nn.Parameter(copied, self.requires_grad)
            if isinstance(self, torch.nn.Parameter)
            else copied
        )

    def __repr__(self) -> str:
        return f"{self.host!r} on {CUDA}"


class Generator(torch.Generator):
    """A random generator of either device; both draw the CPU's numbers.

    C++ passes it to operators without this class, so `on_device` remembers the device.
    """

    on_device: ClassVar[set[int]] = set()

    def __new__(cls, device: torch.device | str = HOST) -> Generator:
        generator = super().__new__(cls)
        if torch.device(device).type == "cuda":
            cls.on_device.add(generator._cdata)
            weakref.finalize(generator, cls.on_device.discard, generator._cdata)
        return generator

    device = property(lambda self: CUDA if self._cdata in Generator.on_device else HOST)


class Stream:
    """A stream. Everything is done when its call returns; `Order` knows what a GPU could do later.

    Attributes:
        seen: stream -> the number of its operators that are surely done before the next one here.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.seen: Counter[Stream] = Counter()

    def wait_stream(self, stream: Stream) -> None:
        self.seen |= stream.seen

    def wait_event(self, event: StreamEvent) -> None:
        self.seen |= event.seen

    def record_event(self) -> StreamEvent:
        event = StreamEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        _active().note("wait", "synchronize")
        _active().order.done |= self.seen


class StreamEvent:
    """An event: what is done when a stream has come to it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.seen: Counter[Stream] = Counter()

    def record(self, stream: Stream | None = None) -> None:
        self.seen = Counter((stream or _active().order.current).seen)

    def synchronize(self) -> None:
        _active().note("wait", "synchronize")
        _active().order.done |= self.seen

    def elapsed_time(self, end: StreamEvent) -> float:
        return 1.0


class Order:
    """The order of operators on several streams, for memory to which an asynchronous copy from the
    host has written, and for the host memory that it reads.

    Raises for what a GPU could do in another order: an operator that reads or writes memory before
    another stream's write to it is surely done, or writes it before another stream's read is.

    Attributes:
        current: the stream of operators.
        done: as `Stream.seen`, for the host.
    """

    def __init__(self) -> None:
        self.current = Stream()
        self.done: Counter[Stream] = Counter()
        self._default = self.current
        self._accesses: dict[int, list[tuple[Stream, int, bool]]] = {}

    @contextlib.contextmanager
    def within(self, stream: Stream | None) -> Iterator[None]:
        """Let operators be those of a stream; None: of the present one."""
        before = self.current
        self.current = stream or before
        try:
            yield
        finally:
            self.current = before

    def copy_begins(self, target: Tensor, source: Tensor) -> None:
        """Begin to watch the memory of an asynchronous copy. All earlier operators of the default
        stream may have used its target."""
        earlier = (self._default, self._default.seen[self._default], True)
        self._accesses.setdefault(_storage(target), [earlier])
        self._accesses.setdefault(_storage(source), [])

    def operator(self, name: str, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        """Check an operator of the present stream, and note it.

        Raises:
            RuntimeError: its order is not certain.
        """
        stream = self.current
        stream.seen[stream] += 1
        self._check(name, reads, writes, stream.seen, stream)

    def on_host(self, name: str, writes: Iterable[Tensor]) -> None:
        """Check an operator of the host.

        Raises:
            RuntimeError: a copy may still read what it writes.
        """
        self._check(name, [], writes, self.done, None)

    def everything(self) -> Counter[Stream]:
        """Return what is done once all streams are idle."""
        found = Counter(self.current.seen)
        for accesses in self._accesses.values():
            for stream, _, _ in accesses:
                found |= stream.seen
        return found

    def _check(
        self,
        name: str,
        reads: Iterable[Tensor],
        writes: Iterable[Tensor],
        seen: Counter[Stream],
        stream: Stream | None,
    ) -> None:
        if not self._accesses:
            return
        kinds = {_storage(tensor): False for tensor in reads}
        kinds |= {_storage(tensor): True for tensor in writes}
        for at, is_write in kinds.items():
            accesses = self._accesses.get(at)
            if accesses is None:
                continue
            for other, number, was_write in accesses:
                if (is_write or was_write) and seen[other] < number:
                    present = "written" if is_write else "read"
                    earlier = "writes" if was_write else "reads"
                    raise RuntimeError(
                        f"{name}: memory is {present} while another stream perhaps still "
                        f"{earlier} it at {_place()}"
                    )
            if stream is not None:
                newest = (stream, seen[stream], is_write)
                # what a write comes after needs no further check
                self._accesses[at] = [newest] if is_write else [*accesses, newest]


def _storage(tensor: Tensor) -> int:
    return _host_of(tensor).untyped_storage().data_ptr()


@dataclasses.dataclass(frozen=True)
class Call:
    """An operator and its arguments, on the host."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self) -> Any:
        return self.func(*self.args, **self.kwargs)

    @property
    def makes_memory(self) -> bool:
        """Whether the results are new memory, neither views of arguments nor arguments written in
        place."""
        return all(result.alias_info is None for result in self.func._schema.returns)


class Graph:
    """A captured graph: its calls and the memory that holds their results."""

    def __init__(self) -> None:
        self.calls: list[tuple[Call, Any]] = []
        self.bytes = 0

    def replay(self) -> None:
        for call, results in self.calls:
            again = call()
            if call.makes_memory:
                for result, value in zip(_tensors([results]), _tensors([again]), strict=True):
                    result.copy_(value)


class PretendCuda(TorchDispatchMode):
    """The device, for a `with` block; on exit all patches are undone.

    Memory is modelled only for what graphs keep: an allocation stays in the cache until
    `empty_cache`, and one made during a capture stays until its graph is gone.

    Args:
        memory: bytes of the device.

    Attributes:
        events: copies by the host, and its waits.
        captures: number of captured graphs.
        order: of operators on several streams.
    """

    def __init__(self, memory: int = 80 * 2**30) -> None:
        super().__init__()
        self.memory = memory
        self.events: list[Event] = []
        self.captures = 0
        self._ranges: list[str] = []
        self._capture: Graph | None = None
        self._cached = self._kept = 0
        self._pinned: list[Tensor] = []
        self.order = Order()
        self._patches = contextlib.ExitStack()

    # -- the block ---------------------------------------------------------------------------------

    def __enter__(self) -> PretendCuda:
        _ensure_guard()
        with contextlib.ExitStack() as stack:
            for name, value in self._runtime().items():
                stack.enter_context(mock.patch.object(torch.cuda, name, value))
            stack.enter_context(mock.patch.object(torch, "Generator", Generator))
            stack.enter_context(mock.patch.object(torch, "autocast", _autocast))
            # Ranges say in which phase of an iteration an event happened.
            stack.enter_context(mock.patch.dict(profiling._OPENERS, pretend=lambda: self._range))
            stack.enter_context(profiling.ranges("pretend"))
            # `torch.tensor(..., device="cuda")` fills host memory, and its copy to the device is
            # dispatched.
            stack.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
            torch._C._set_only_lift_cpu_tensors(True)
            # Only CUDA has a matmul that writes another dtype than it reads.
            library = torch.library.Library("aten", "IMPL")
            library.impl(
                "mm.dtype", lambda a, b, out_dtype: a.to(out_dtype) @ b.to(out_dtype), "CPU"
            )
            stack.callback(library._destroy)
            # A conversion makes new parameters: new memory under the old ones would keep the CPU's
            # class.
            stack.callback(
                torch.__future__.set_overwrite_module_params_on_conversion,
                torch.__future__.get_overwrite_module_params_on_conversion(),
            )
            torch.__future__.set_overwrite_module_params_on_conversion(True)
            stack.callback(_stack.remove, self)
            _stack.append(self)
            super().__enter__()
            self._patches = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def _runtime(self) -> dict[str, Any]:
        """Replacements for functions of `torch.cuda`, by name."""
        return {
            "_lazy_init": lambda: None,
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "set_device": lambda device: None,
            "device": contextlib.nullcontext,
            "get_device_name": lambda device=None: "pretend CUDA",
            "get_device_capability": lambda device=None: (9, 0),
            "get_device_properties": lambda device=None: SimpleNamespace(
                total_memory=self.memory,
                L2_cache_size=50 * 2**20,
                major=9,
                minor=0,
                multi_processor_count=132,
            ),
            "mem_get_info": lambda device=None: (self.memory, self.memory),
            "memory_reserved": lambda device=None: self._cached + self._kept,
            "memory_allocated": lambda device=None: self._kept,
            "max_memory_allocated": lambda device=None: self._cached + self._kept,
            "reset_peak_memory_stats": lambda device=None: None,
            "empty_cache": self._empty_cache,
            "synchronize": self._synchronize,
            "Stream": Stream,
            "Event": StreamEvent,
            "current_stream": lambda device=None: self.order.current,
            "stream": self.order.within,
            "set_stream": lambda stream: setattr(self.order, "current", stream),
            "graph_pool_handle": lambda: (0, 0),
            "CUDAGraph": Graph,
            "graph": self._graph,
            "is_current_stream_capturing": lambda: self._capture is not None,
        }

    # -- what is written down ----------------------------------------------------------------------

    def note(self, kind: str, what: str) -> None:
        """Record an event.

        Raises:
            RuntimeError: a graph is being captured.
        """
        event = Event(kind, what, tuple(self._ranges), _place())
        if self._capture is not None:
            raise RuntimeError(
                f"operation not permitted when stream is capturing: {kind} ({what}) at "
                f"{event.place}"
            )
        self.events.append(event)

    def within(self, name: str) -> list[Event]:
        """Events in ranges whose name begins with `name`."""
        return [
            event
            for event in self.events
            if any(range_.startswith(name) for range_ in event.ranges)
        ]

    @contextlib.contextmanager
    def _range(self, name: str) -> Iterator[None]:
        self._ranges.append(name)
        try:
            yield
        finally:
            self._ranges.pop()

    # -- operators ---------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [*_tensors(args), *_tensors(kwargs.values())]
        on_device = any(isinstance(tensor, CudaTensor) for tensor in tensors) or _is_made_on_device(
            kwargs, tensors
        )
        pinned = kwargs.pop("pin_memory", False)
        if func.overloadpacket is aten._pin_memory:
            func, pinned, args, kwargs = aten.clone.default, True, args[:1], {}
        if not on_device:
            self.order.on_host(str(func), _written_tensors(func, args, kwargs))
            out = func(*args, **kwargs)
            if pinned:
                self._pinned.append(out)
            return out

        self._check(func, args, kwargs, tensors)
        self._follow(func, args, kwargs, tensors)
        if "device" in kwargs:
            kwargs["device"] = HOST
        call = Call(
            func,
            _each(_host_of, args),
            {name: _each(_host_of, value) for name, value in kwargs.items()},
        )
        out = call()
        if self._capture is not None:
            self._capture.calls.append((call, out))
        if call.makes_memory:
            self._count(sum(tensor.nbytes for tensor in _tensors([out])))
            return _each(CudaTensor, out)
        written = _written(func, args, kwargs)
        return _each(CudaTensor, out) if written is None else written

    def _check(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> None:
        """Raise for what a GPU would refuse; record what its host would wait for."""
        name, packet = str(func), func.overloadpacket
        others = [tensor for tensor in tensors if not isinstance(tensor, CudaTensor)]
        generator = kwargs.get("generator")
        if generator is not None and generator._cdata not in Generator.on_device:
            raise RuntimeError(
                f"{name}: expected a 'cuda' device type for generator but found 'cpu' at {_place()}"
            )
        if packet in (aten.copy_, aten._to_copy):
            if others:
                kind = (
                    "copy to device"
                    if isinstance(args[0], CudaTensor) or packet is aten._to_copy
                    else "copy to host"
                )
                non_blocking = kwargs.get("non_blocking") or args[2:] == (True,)
                self.note(
                    "asynchronous " * (non_blocking and self._is_pinned(others[0])) + kind, name
                )
            return
        if "device" in kwargs and packet._qualified_op_name.endswith("_like"):
            return  # only reads the shape
        if packet in INDEXING:
            indices = [index for index in args[1] if index is not None]
            if not isinstance(args[0], CudaTensor):
                raise RuntimeError(f"{name}: a host tensor is indexed on the device at {_place()}")
            if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
                self.note("wait", f"{name} with a mask")
            if any(not isinstance(index, CudaTensor) for index in indices):
                self.note("copy to device", f"{name} with indices of the host")
            others = [other for other in others if all(other is not index for index in indices)]
        elif packet in WAITS:
            self.note("wait", name)
        # A kernel takes a host scalar as an argument; it can read no other host tensor.
        allowed = torch.Tag.pointwise in func.tags or packet in INDEXING
        if others and not (allowed and all(other.ndim == 0 for other in others)):
            where = [f"{tensor.device.type} {list(tensor.shape)}" for tensor in tensors]
            raise RuntimeError(f"{name}: tensors on two devices at {_place()}: {', '.join(where)}")

    def _follow(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> None:
        """Tell `order` of an operator on the device; a view touches no memory."""
        writes = _written_tensors(func, args, kwargs)
        if not writes and any(result.alias_info is not None for result in func._schema.returns):
            return
        reads = [tensor for tensor in tensors if all(tensor is not other for other in writes)]
        if func.overloadpacket is aten.copy_:
            target, source = args[:2]
            comes_from_host = isinstance(target, CudaTensor) and not isinstance(source, CudaTensor)
            if comes_from_host and self._is_pinned(source):
                self.order.copy_begins(target, source)
            if not isinstance(target, CudaTensor):
                # the host waits for it, unless it is asynchronous, which nothing here is
                self.order.on_host(str(func), [target])
                writes = []
        self.order.operator(str(func), reads, writes)

    def _synchronize(self, device: object = None) -> None:
        self.note("wait", "synchronize")
        self.order.done |= self.order.everything()

    def _is_pinned(self, tensor: Tensor) -> bool:
        at = tensor.untyped_storage().data_ptr()
        return any(pinned.untyped_storage().data_ptr() == at for pinned in self._pinned)

    # -- memory and graphs -------------------------------------------------------------------------

    def _count(self, size: int) -> None:
        if self._capture is None:
            self._cached += size
        else:
            self._capture.bytes += size
            self._kept += size

    def _empty_cache(self) -> None:
        self._cached = 0

    def _release(self, size: int) -> None:
        self._kept -= size  # a graph is gone

    @contextlib.contextmanager
    def _graph(
        self,
        graph: Graph,
        pool: object = None,
        stream: Stream | None = None,
        capture_error_mode: str = "global",
    ) -> Iterator[None]:
        """Do as `torch.cuda.graph` does: wait for the device, empty the cache, then capture."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self._capture = graph
        try:
            yield
        finally:
            self._capture = None
            weakref.finalize(graph, self._release, graph.bytes)
        self.captures += 1


@functools.cache
def _ensure_guard() -> None:
    """Give C++ a guard for the missing device.

    It cannot be removed, and only PretendCuda uses it.
    """
    if torch.version.cuda is not None:
        torch._C._ensureCUDADeviceGuardSet()
        return
    file = Path(__file__).with_name("pretend_cuda_guard.cpp")
    cpp_extension.load("sage_fast_pretend_cuda_guard", [str(file)], is_python_module=False)


_stack: list[PretendCuda] = []


def _active() -> PretendCuda:
    """The device of the innermost block."""
    return _stack[-1]


class _autocast(torch.autocast):
    """Autocast for the CPU, where C++ believes our tensors to be."""

    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu" if device_type == "cuda" else device_type, *args, **kwargs)


@contextlib.contextmanager
def cudnn_attention() -> Iterator[list[tuple[tuple[Tensor, ...], bool]]]:
    """Let cuDNN's attention operator run on the CPU; yield its calls: `(query, key, value)`, with
    statistics or not.

    Without statistics it rounds differently, as cuDNN's plan for inference may.
    """
    calls: list[tuple[tuple[Tensor, ...], bool]] = []

    def forward(
        query: Tensor, key: Tensor, value: Tensor, bias: None, statistics: bool, *options: Any
    ) -> Any:
        assert bias is None
        assert options in ((), (0.0, False))
        calls.append(((query, key, value), statistics))
        scores = query @ key.mT * query.shape[-1] ** -0.5
        # in query's layout, as on a GPU
        out = torch.empty_like(query).copy_(scores.softmax(-1) @ value)
        if not statistics:
            out *= 1 + 2 * torch.finfo(out.dtype).eps
        none = torch.zeros((), dtype=torch.long)
        rows = query.shape[2], key.shape[2]
        return out, scores.logsumexp(-1, keepdim=True), None, None, *rows, none, none, None

    def backward(
        grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, *_: Any
    ) -> Any:
        scale = query.shape[-1] ** -0.5
        weights = (query @ key.mT * scale - sums).exp()
        scores = weights * (grad @ value.mT - (grad * out).sum(-1, keepdim=True)) * scale
        return scores @ key, scores.mT @ query, weights.mT @ grad

    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_cudnn_attention", forward, "CPU")
    library.impl("_scaled_dot_product_cudnn_attention_backward", backward, "CPU")
    try:
        yield calls
    finally:
        library._destroy()


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """List the tensors among the arguments or results of an operator, including those in nested
    lists."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


def _each(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Apply `function` to every tensor in `value`."""
    if isinstance(value, Tensor):
        return function(value)
    return (
        type(value)([_each(function, item) for item in value])
        if isinstance(value, list | tuple)
        else value
    )


def _host_of(tensor: Tensor) -> Tensor:
    return tensor.host if isinstance(tensor, CudaTensor) else tensor


def _is_made_on_device(kwargs: dict[str, Any], tensors: list[Tensor]) -> bool:
    """Whether a result of host tensors, or of none, belongs on the device.

    It does if the call asks for the device, or if autograd's C++ makes it, such as the zeros of a
    gradient that nothing has reached: C++ takes the device from its own side of a tensor.
    """
    device = kwargs.get("device")
    if device is None:
        return False
    return torch.device(device).type == "cuda" or (not tensors and _called_by_autograd())


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Result of an in-place operator, which is the arguments that it writes to; None for other
    operators."""
    written = _written_arguments(func, args, kwargs)
    assert not (written and torch.Tag.inplace_view in func.tags), (
        f"{func} changes the shape of a tensor in place"
    )
    return written[0] if len(written) == 1 else written or None


def _written_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operator writes to in place."""
    return _tensors(_written_arguments(func, args, kwargs))


def _written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the arguments that an operator writes to, tensors and lists of them."""
    found = []
    for argument, value in itertools.zip_longest(func._schema.arguments, args):
        alias = argument.alias_info
        if alias is not None and alias.is_write:
            found.append(kwargs.get(argument.name, value))
    return tuple(found)


def _called_by_autograd() -> bool:
    """Whether the engine's C++ called this operator, with no Python function between."""
    frame = sys._getframe(1)
    while frame.f_globals["__name__"] in _DISPATCH:
        frame = frame.f_back
    return frame.f_code is torch.autograd.graph._engine_run_backward.__code__


_DISPATCH = (__name__, "torch._compile", "torch._dynamo.eval_frame")
"""Modules whose functions stand between an operator's caller and `PretendCuda.__torch_dispatch__`.
"""


def _place() -> str:
    """Innermost line of sage_fast on the stack."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "outside sage_fast"
