"""A step that is recorded once and repeated on the same addresses gives, later, what the step itself would: all bits.

Ranks are threads over NCCL's simulator, tensors are on the CPU, and a tape of operators takes the place of a CUDA
graph (`tests.gpu.op_tape`). Buffers of one step lie where those of the step before lay, so that one tape serves all.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from diffusers.models.activations import GELU
from diffusers.models.attention_dispatch import attention_backend
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from patchpar.comm.collectives import Communicator
from patchpar.comm.traffic import CommStats
from patchpar.comm.transport.message_memory import MessageMemory
from patchpar.comm.transport.torch_p2p import TorchTransport
from patchpar.errors import UnsupportedModel
from patchpar.plan.mesh import Axis
from patchpar.plan.step_clock import StepClock
from patchpar.shard import fingerprint as fingerprints
from patchpar.shard.denoiser import WholeDenoiser
from patchpar.shard.fingerprint import fingerprint
from patchpar.shard.graphs import recorder, step_graphs
from patchpar.shard.graphs.repeated_network import baked_in, why_not_repeated
from patchpar.shard.graphs.static_call import StaticCall, signature_of, why_not_static
from patchpar.shard.graphs.step_graphs import MOST_KINDS, Stateless, StepGraphs
from patchpar.shard.stale.cache import StaleCache
from patchpar.shard.transformer.denoiser import TokenDenoiser
from patchpar.strategies.displaced import DisplacedPatch
from tests.breadth import first_of
from tests.conformance.stand_in import SimulatedRank, StandIn
from tests.gpu.op_tape import MemoryIsFreedError, OpTape, TapeRecorder
from tests.gpu.steps import Case, Found, model, predicted, predicted_without_graphs
from tests.unit.threads import on_threads
from tests.weights.quantised import Int8Weight

POOLED, PARTIALS = "fresh-edges:context=pooled", "fresh-edges:context=partials,refresh=2"
STRATEGIES = (
    "exact",
    "exact:ulysses=2",
    "displaced",
    "displaced:preset=paper",
    "pcpp",
    "fresh-edges",
    "fresh-edges:correction=none",
    "fresh-edges:correction=linear",
    "fresh-edges:bits=8",
    POOLED,
    PARTIALS,
)
ALWAYS = (("flux", PARTIALS, 2),)
"""The others take longer, UNets above all."""


@pytest.fixture(autouse=True)
def as_in_pipelines() -> Iterator[None]:
    with torch.no_grad():
        yield


def taped(stand_in: StandIn, transport: TorchTransport) -> TapeRecorder:
    return TapeRecorder(stand_in.rank)


def are_equal(found: list[Found], wanted: list[Found]) -> bool:
    """Whether all predictions are the same bits. No `assert` compares them: its message would take a minute."""
    pairs = zip(found, wanted, strict=True)
    return all(list(map(bits, one.predictions)) == list(map(bits, other.predictions)) for one, other in pairs)


def bits(x: Tensor) -> bytes:
    return x.contiguous().numpy().tobytes()


def expected_replays(case: Case) -> int:
    """Of two images: the first step that is like later ones runs, the second is captured, and runs as a replay.

    In the second image all that are like others are replays.
    """
    evaluations = 2 * case.evaluations - 2  # of both images
    if case.strategy.startswith("exact"):
        return case.calls * (evaluations - 2) - 1  # all but the first of each image
    kinds = 2 if case.strategy == PARTIALS else 1  # layers are refreshed in turn
    return case.calls * (evaluations - 4 - kinds)  # after the exact step, and the stale one that reads its values


@pytest.mark.parametrize(
    ("model", "strategy", "world"),
    first_of(
        [(model, strategy, world) for model in ("sdxl", "flux") for strategy in STRATEGIES for world in (2, 4)], *ALWAYS
    ),
)
def test_replayed_steps_equal_steps_that_run_bit_for_bit(model: str, strategy: str, world: int) -> None:
    case = Case(model=model, strategy=strategy, world=world)
    found, wanted = predicted(case, taped), predicted_without_graphs(case)
    assert are_equal(found, wanted)
    assert {each.replays for each in found} == {expected_replays(case)}
    assert [each.sent for each in found] == [each.sent for each in wanted], "replays count what they send"


@pytest.mark.breadth
def test_calls_of_one_step_are_graphs_of_their_own() -> None:
    case = Case(model="sdxl", strategy="displaced", calls=2)
    found = predicted(case, taped)
    assert are_equal(found, predicted(case))
    assert {each.replays for each in found} == {expected_replays(case)}


# --- controls -------------------------------------------------------------------------------------------------------


def moving(memory: MessageMemory, name: str, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Other memory in every step, as without `MessageMemory`."""
    found = memory._buffers[name] = torch.empty(size, dtype=dtype, device=device)
    return found


def test_a_buffer_that_moves_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MessageMemory, "take", moving)
    with pytest.raises(UnsupportedModel, match="a buffer that one step leaves to the next lies elsewhere each time"):
        predicted(Case(model="flux", strategy="pcpp"), taped)


def test_a_buffer_that_moves_unseen_is_memory_that_has_been_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check of addresses a graph reads where the step before has left nothing."""
    monkeypatch.setattr(MessageMemory, "take", moving)
    monkeypatch.setattr(StaleCache, "stored", lambda _: ())
    with pytest.raises(MemoryIsFreedError, match=r"comes to a tensor .* from before the step, which has been freed"):
        predicted(Case(model="flux", strategy=PARTIALS), taped)


def reads_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of each stale step."""
    step = TokenDenoiser._stale_step

    def reading(split: TokenDenoiser, history: Any, *args: Any, **kwargs: Any) -> Any:
        found = step(split, history, *args, **kwargs)
        history.cache.drift.sum().item()
        return found

    monkeypatch.setattr(TokenDenoiser, "_stale_step", reading)


def test_a_value_that_is_read_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    reads_a_value(monkeypatch)
    with pytest.raises(UnsupportedModel, match=r"_local_scalar_dense reads a value .* Use graphs='auto'"):
        predicted(Case(model="flux", strategy="fresh-edges"), taped)


def test_where_a_capture_is_refused_in_the_middle_the_step_runs_as_if_nothing_had_been(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    case = Case(model="flux", strategy="fresh-edges")
    wanted = predicted_without_graphs(case)
    reads_a_value(monkeypatch)
    found = predicted(case, taped, required=False)
    assert are_equal(found, wanted)
    assert {each.replays for each in found} == {0}
    assert "reads a value" in found[0].refused
    assert "its steps run without graphs" in caplog.text


def test_graphs_leave_memory_to_what_comes_after_the_denoiser(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A capture takes the memory of a step for good, and an image that fits without would not be decoded."""
    case = Case(model="flux", strategy="exact")
    wanted = predicted_without_graphs(case)
    for fraction, required, is_refused in ((0.11, False, True), (0.09, False, False), (0.11, True, False)):
        monkeypatch.setattr(OpTape, "fraction", fraction)
        found = predicted(case, taped, required=required)
        assert are_equal(found, wanted)
        assert {each.replays for each in found} == {0 if is_refused else expected_replays(case)}
        assert ("graphs of it take 11% of the device's memory, and may take 10%" in caplog.text) == is_refused
        caplog.clear()


# --- what is refused before a capture -------------------------------------------------------------------------------

CPU = torch.device("cpu")


def test_a_network_that_decides_in_each_step() -> None:
    network = deepcopy(model("sdxl").network)
    before = fingerprint(network)
    assert not why_not_repeated(network, before, fingerprint(network))

    network.conv_in.calls = 1
    assert why_not_repeated(network, before, fingerprint(network)) == "calls of conv_in changes from step to step"
    del network.conv_in.calls

    network.register_to_config(num_frame_per_block=5)  # as SkyReels-V2 is told to attend to blocks of frames
    why = why_not_repeated(network, before, fingerprint(network))
    assert why == "configuration of the denoiser changes from step to step"

    network.enable_layerwise_casting(torch.float16, torch.float32)
    assert "may move weights or skip layers in each step" in why_not_repeated(network, before, fingerprint(network))

    network = deepcopy(model("sdxl").network)
    forward = network.conv_in.forward
    network.conv_in.forward = lambda x: forward(x)
    before = fingerprint(network)
    assert "is code of another library" in why_not_repeated(network, before, before)


def test_arguments_of_a_graph_are_plain_tensors_of_its_device() -> None:
    x = torch.ones(2)
    assert not why_not_static(((x,), {"scale": 0.5, "names": ["a", None]}), CPU)
    assert why_not_static(((), {"timestep": x}), torch.device("meta")) == (
        "argument [1]['timestep'] is on cpu, and a graph reads memory of meta only"
    )
    assert "is a Parameter, whose values may come later" in why_not_static(((torch.nn.Parameter(x),), {}), CPU)
    assert "is a object, which the denoiser may change" in why_not_static(((object(),), {}), CPU)


def test_a_signature_has_all_that_a_graph_repeats() -> None:
    x, y = torch.ones(2, 3), torch.ones(2, 3)
    calls: list[Any] = [
        ((x, y), {}),
        ((x, x), {}),
        ((x, y.t().contiguous().t()), {}),
        ((x, y.double()), {}),
        ((x, y), {"scale": 0.5}),
        ((x, y), {"scale": 0.25}),
        ((x,), {"y": y}),
    ]
    plain = signature_of(calls[0])
    assert len({signature_of(call) for call in calls}) == len(calls)
    assert plain == signature_of(((x + 1, y + 1), {}))
    with torch.autocast("cpu", torch.bfloat16):
        assert signature_of(calls[0]) not in [plain, signature_of(calls[1])]


@contextmanager
def set_by(set_to: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    set_to(value)
    try:
        yield
    finally:
        set_to(before)


@contextmanager
def with_tf32() -> Iterator[None]:
    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, not torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize(
    "other",
    [
        torch.no_grad,
        torch.inference_mode,
        partial(torch.autocast, "cpu", torch.bfloat16),
        partial(set_by, torch.set_default_dtype, torch.float64, torch.float32),
        partial(set_by, torch.use_deterministic_algorithms, True, False),
        partial(set_by, torch.set_float32_matmul_precision, "high", "highest"),
        with_tf32,
        partial(torch.nn.attention.sdpa_kernel, SDPBackend.MATH),
        partial(attention_backend, "_native_math"),
    ],
)
def test_kernels_that_torch_chooses_otherwise_are_of_another_kind_of_step(
    other: Callable[[], AbstractContextManager[Any]],
) -> None:
    """A graph repeats those that were chosen at its capture."""
    call = (torch.ones(2, 3),), dict[str, Any]()
    with torch.enable_grad():
        plain = signature_of(call)
        with other():
            assert signature_of(call) != plain


class Anything:
    """An object that a pipeline makes in each step."""


def graphs_alone(network: nn.Module) -> StepGraphs:
    comm: Any = SimpleNamespace(transport=SimpleNamespace(device=CPU), traffic=CommStats())
    return StepGraphs(network, Mock(), (comm, Axis("patch", 0, 1, (0,))))


def test_ranks_refuse_an_object_in_the_same_step() -> None:
    """They vote on each capture: where one had an object at an address of before, and another not, it would wait."""
    graphs, kept = graphs_alone(nn.Linear(1, 1)), list[Any]()
    for step in range(2):
        assert not graphs.refused, step
        kept.append(Anything())
        graphs.run("exact", lambda *args: None, ((torch.ones(2), kept[-1]), {}), Stateless())
    assert graphs.refused.startswith("argument [0][1] is a Anything, which the denoiser may change")


@pytest.mark.parametrize("keeps", [True, False])
def test_a_step_that_leaves_tensors_for_other_code_is_not_captured(
    monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    """As self-attention guidance (arXiv:2210.00939), which reads after each call what a processor has left there."""
    monkeypatch.setattr(step_graphs, "every_rank_has", lambda mesh, where, here: here)
    network = nn.Linear(1, 1)
    capture = Mock(side_effect=lambda step, _: SimpleNamespace(output=step(), fraction=0, untaken=1))
    graphs = StepGraphs(network, Mock(capture=capture), graphs_alone(network)._mesh)
    monkeypatch.setattr(StepGraphs, "_replayed", lambda self, graph, call, state: None)

    def step(x: Tensor) -> None:
        if keeps or not hasattr(network, "computed_once"):
            vars(network)["computed_once"] = (64, [x.clone()])

    step(torch.ones(1))  # the first of an image
    for _ in range(3):
        graphs.run("exact", step, ((torch.ones(1),), {}), Stateless())
    reason = "computed_once of the denoiser keeps tensors of each step, for code that reads them afterwards"
    assert graphs.refused == (reason if keeps else "")
    if not keeps:
        kept = weakref.ref(vars(network)["computed_once"][1][0])
        del network.computed_once
        assert kept() is not None, "the graph reads it at its address"


class Store:
    """What a processor has for all layers, such as attention maps that its pipeline reads after each step."""

    def __init__(self) -> None:
        self.by_layer = {"mid": [torch.zeros(1)]}


def looked_at(monkeypatch: pytest.MonkeyPatch, network: nn.Module) -> tuple[StepGraphs, list[str]]:
    """The graphs of a network, and what each step does."""
    did = list[str]()
    monkeypatch.setattr(fingerprints, "KNOWN", fingerprints.KNOWN | {"tests", "types"})  # as if it were diffusers'
    monkeypatch.setattr(step_graphs, "every_rank_has", lambda mesh, where, here: here)
    monkeypatch.setattr(StepGraphs, "_replayed", lambda self, graph, call, state: did.append("replayed"))

    def capture(step: Callable[[], Any], what: str) -> Any:
        step()
        did.append("captured")
        return SimpleNamespace(output=None, fraction=0.0, untaken=1.0)

    return StepGraphs(network, Mock(capture=capture), graphs_alone(network)._mesh), did


def steps(graphs: StepGraphs, did: list[str], count: int, step: Callable[..., Any] = lambda x: None) -> list[str]:
    """What so many steps of one kind do."""
    for _ in range(count):
        number = len(did)
        graphs.run("exact", step, ((torch.ones(1),), {}), Stateless())
        did += ["ran"] * (len(did) == number)
    found = did.copy()
    did.clear()
    return found


def test_tensors_left_in_an_object_of_a_processor_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As LEDITS++ (arXiv:2311.16711) reads them from its attention store."""
    network: Any = nn.Linear(1, 1)
    network.processor = SimpleNamespace(store=Store())
    graphs, did = looked_at(monkeypatch, network)

    def storing(x: Tensor) -> None:
        network.processor.store.by_layer["mid"] = [x + 1]

    assert steps(graphs, did, 3, storing) == ["ran", "captured", "ran"]
    assert graphs.refused.startswith("store of the denoiser keeps tensors of each step")


@pytest.mark.parametrize("depth", ["attribute", "list", "object", "data"])
def test_a_tensor_in_the_place_of_one_that_a_graph_reads_ends_it(monkeypatch: pytest.MonkeyPatch, depth: str) -> None:
    """The graph would read the one of before, which has the same shape."""
    network: Any = nn.Linear(1, 1)
    network.bias_map, network.maps, network.store = torch.zeros(2), [torch.zeros(2)], Store()
    graphs, did = looked_at(monkeypatch, network)
    assert steps(graphs, did, 3) == ["ran", "captured", "replayed", "replayed"]
    if depth == "attribute":
        network.bias_map = torch.ones(2)
    elif depth == "list":
        network.maps[0] = torch.ones(2)
    elif depth == "object":
        network.store.by_layer["mid"] = [torch.ones(1)]
    else:
        network.bias_map.data = torch.ones(2)
    assert steps(graphs, did, 3) == ["ran", "captured", "replayed", "replayed"]
    network.bias_map.add_(1)
    assert steps(graphs, did, 1) == ["replayed"], "numbers in its place are read there"


def transposed(network: Any) -> None:
    network.weight.data = network.weight.data.t()


def trained(network: Any) -> None:
    network.train()


def scaled_by_a_tensor(network: Any) -> None:
    network.scaling["a"] = network.scaling["a"].clone()


@pytest.mark.parametrize("change", [transposed, trained, scaled_by_a_tensor])
def test_what_a_graph_repeats_of_a_network_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], None]
) -> None:
    """Between images, and after a callback."""
    network: Any = nn.Linear(2, 2).eval()
    network.scaling = {"a": torch.tensor(0.5), "b": 0.5}
    graphs, did = looked_at(monkeypatch, network)
    graphs.look_at_network()
    assert steps(graphs, did, 3) == ["ran", "captured", "replayed", "replayed"]
    graphs.look_at_network()
    network.scaling["a"].fill_(0.25)
    graphs.look_at_network()
    assert steps(graphs, did, 1) == ["replayed"], "a graph reads the number where it lies"
    change(network)
    graphs.look_at_network()
    assert steps(graphs, did, 3) == ["ran", "captured", "replayed", "replayed"]


def test_a_factor_that_changes_from_step_to_step_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    network: Any = nn.Linear(1, 1)
    network.scale = 1.0
    graphs, did = looked_at(monkeypatch, network)

    def scaling(x: Tensor) -> None:
        network.scale *= 0.5

    assert steps(graphs, did, 3, scaling) == ["ran"] * 3
    assert graphs.refused == "its weights, their modes, or factors of adapters change from step to step"


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_a_step_writes_to_its_arguments_is_there_afterwards(
    monkeypatch: pytest.MonkeyPatch, mode: Callable[[], AbstractContextManager[None]]
) -> None:
    """As keys of earlier frames, for the next step."""
    monkeypatch.setattr(step_graphs, "every_rank_has", lambda mesh, where, here: here)
    network, comm = nn.Linear(1, 1), Mock(traffic=CommStats())
    comm.transport.device = CPU
    graphs = StepGraphs(network, TapeRecorder(SimulatedRank()), (comm, Axis("patch", 0, 1, (0,))))

    def step(x: Tensor, cache: dict[str, Tensor]) -> Tensor:
        cache["keys"][1:].mul_(2).add_(x)
        return cache["keys"].sum() + cache["other"]

    caches = [{"keys": torch.ones(3), "other": torch.ones(1)} for _ in range(2)]
    with mode():
        for number in range(5):
            x = torch.full((2,), float(number))
            found = graphs.run("exact", step, ((x, caches[0]), {}), Stateless())
            assert torch.equal(found, step(x, caches[1]))
            assert torch.equal(caches[0]["keys"], caches[1]["keys"])
    assert graphs.replays == 4


def test_gradients_are_not_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    network = nn.Linear(1, 1)
    graphs, did = looked_at(monkeypatch, network)
    with torch.enable_grad():
        assert steps(graphs, did, 3) == ["ran"] * 3
    assert graphs.refused == "its weights require gradients, which a graph does not compute"
    x = torch.ones(1, requires_grad=True)
    with torch.enable_grad():
        assert why_not_static(((x,), {}), CPU) == "argument [0][0] requires gradients, which a graph does not compute"
    assert not why_not_static(((x,), {}), CPU)


def test_images_of_two_sizes_in_turn_are_no_arguments_that_differ_from_step_to_step() -> None:
    """Each time buffers are allocated anew, and steps before have no others of their kind any more."""
    graphs, state = graphs_alone(nn.Linear(1, 1)), Stateless()
    for image in range(2 * MOST_KINDS):
        state.generation = image
        graphs.run("stale", lambda x: x, ((torch.ones(2 + image % 2),), {}), state)
    assert not graphs.refused
    assert len(graphs._ran) == 1, "what is known of steps on earlier buffers is dropped"
    for step in range(2 * MOST_KINDS):
        graphs.run("stale", lambda x, scale: x, ((torch.ones(2), float(step)), {}), state)
        if graphs.refused:
            break
    assert "its arguments differ from step to step" in graphs.refused, "control"


def test_where_another_rank_cannot_capture_a_step_it_runs_here_as_if_nothing_had_been(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank that replays beside one that runs the step would count, and from then on know, another thing."""
    monkeypatch.setattr(step_graphs, "every_rank_has", lambda *_: False)
    graphs, state = graphs_alone(nn.Linear(1, 1)), Mock(generation=0)
    state.snapshot.return_value, state.stored.return_value = "before", ()
    sent = graphs._mesh[0].traffic.bytes_sent

    def capture(step: Any, what: str) -> Any:
        step()
        return SimpleNamespace(output=None, fraction=0.0, untaken=1.0)

    def step(x: Tensor) -> Tensor:
        sent["kv"] += 1
        return x + 1

    graphs._recorder = Mock(capture=capture)
    for number in range(3):
        assert graphs.run("exact", step, ((torch.full((1,), float(number)),), {}), state).item() == number + 1
        assert sent["kv"] == number + 1, "what a capture does is not sent"
    assert graphs.refused == "another rank could not capture this step"
    state.set_back.assert_called_once_with("before")


def test_graphs_are_dropped_where_arguments_differ_from_step_to_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them is replayed any more, and each holds the memory of a step."""
    monkeypatch.setattr(step_graphs, "every_rank_has", lambda mesh, where, here: here)
    graphs = graphs_alone(nn.Linear(1, 1))
    monkeypatch.setattr(StepGraphs, "_replayed", lambda self, graph, call, state: None)
    captured = SimpleNamespace(output=None, fraction=0.0, untaken=1.0)
    graphs._recorder = Mock(capture=Mock(return_value=captured))
    for number in (0, 0, *range(1, MOST_KINDS + 2)):
        assert bool(graphs._graphs) == (number > 0 and not graphs.refused)
        graphs.run("exact", lambda x, scale: None, ((torch.ones(1), float(number)), {}), Stateless())
    assert "its arguments differ from step to step" in graphs.refused
    assert not graphs._graphs


def test_a_pause_neither_captures_nor_replays() -> None:
    """Every exchange of a traced call is one of Python's."""
    graphs, ran = graphs_alone(nn.Linear(1, 1)), list[float]()
    graphs.paused = True
    for number in range(3):
        graphs.run("exact", lambda x: ran.append(x.item()), ((torch.full((1,), float(number)),), {}), Stateless())
    assert ran == [0.0, 1.0, 2.0]
    assert not graphs.refused
    assert not graphs._ran


def kinds_of(monkeypatch: pytest.MonkeyPatch, fractions: dict[float, float], **options: Any) -> Callable[[float], str]:
    """Steps of a kind for each number, by what they do; `fractions`: of the memory, that a graph of one takes."""
    did = list[str]()

    def capture(step: Any, what: str) -> Any:
        did.append("captured")
        fraction = fractions.get(graphs_taken[-1], 0.01)
        return SimpleNamespace(output=None, fraction=fraction, untaken=1 - fraction)

    monkeypatch.setattr(step_graphs, "every_rank_has", lambda mesh, where, here: here)
    monkeypatch.setattr(StepGraphs, "_replayed", lambda self, graph, call, state: did.append("replayed"))
    alone = graphs_alone(nn.Linear(1, 1))
    graphs = StepGraphs(nn.Linear(1, 1), Mock(capture=capture), alone._mesh, **options)
    graphs_taken = list[float]()

    def step(number: float) -> str:
        graphs_taken.append(number)
        did.clear()
        graphs.run("exact", lambda x, scale: did.append("ran"), ((torch.ones(1), number), {}), Stateless())
        return " ".join(did)

    return step


def test_a_ninth_kind_of_step_takes_the_place_of_the_one_that_was_used_longest_ago(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a server, to which images of all sizes come."""
    step = kinds_of(monkeypatch, {})
    for number in range(8):
        assert [step(number), step(number), step(number)] == ["ran", "captured replayed", "replayed"]
    assert step(0) == "replayed"
    assert [step(8), step(8), step(8)] == ["ran", "captured replayed", "replayed"]
    assert [step(0), step(2), step(7)] == ["replayed"] * 3
    assert [step(1), step(1)] == ["ran", "captured replayed"], "number 1 made room"
    for number in range(100, 300):
        assert [step(number), step(number)] == ["ran", "captured replayed"], (
            "many sizes are no arguments that always differ"
        )


def test_a_step_that_takes_too_much_memory_leaves_the_graphs_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large image between small ones."""
    step = kinds_of(monkeypatch, {1: 0.2, 2: 0.05, 3: 0.05})
    assert [step(0), step(0), step(0)] == ["ran", "captured replayed", "replayed"]
    assert [step(1), step(1), step(1), step(1)] == ["ran", "captured ran", "ran", "ran"]
    assert [step(2), step(2)] == ["ran", "captured replayed"]
    assert [step(3), step(3), step(3)] == ["ran", "captured ran", "ran"], "0.11 in all"
    assert [step(0), step(2)] == ["replayed"] * 2
    step = kinds_of(monkeypatch, {1: 0.96}, required=True)
    assert [step(1), step(1), step(1)] == ["ran", "captured replayed", "replayed"]


def test_graphs_leave_a_twentieth_of_the_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for untaken, is_refused in ((0.04, True), (0.06, False)):
        monkeypatch.setattr(OpTape, "untaken", untaken)
        found = predicted(Case(model="flux", strategy="exact"), taped, required=False)
        assert all((each.replays == 0) == is_refused for each in found)
        assert ("a graph leaves 4% of the device's memory, and has to leave 5%" in caplog.text) == is_refused
        caplog.clear()


def test_quantised_weights_that_move_are_seen() -> None:
    """What a graph reads is inside: a tensor around other tensors has no address of its own."""
    network = nn.Linear(8, 8, bias=False).requires_grad_(False)
    network.weight = nn.Parameter(Int8Weight.of(torch.randn(8, 8)), requires_grad=False)
    before = baked_in(network)
    assert baked_in(network) == before
    inner: Any = network.weight.data
    network.weight = nn.Parameter(Int8Weight(inner.codes.clone(), inner.scale), requires_grad=False)
    assert baked_in(network) != before


def test_after_a_failed_call_messages_end_with_the_step_all_the_same() -> None:
    """Those of a graph have to, and the next image is captured again."""

    def joins(transport: Any) -> list[bool]:
        network, mesh = nn.Linear(1, 1), (Communicator(transport), Axis("patch", 0, 1, (0,)))
        denoiser = WholeDenoiser(network, mesh, DisplacedPatch().policy, clock=StepClock())
        denoiser.use_graphs(StepGraphs(network, Mock(), mesh))
        assert denoiser.history is not None
        before, state = denoiser.history, denoiser.history.cache.joins
        denoiser.discard()
        assert denoiser.history is not before
        return [state, denoiser.history.cache.joins]

    assert on_threads(1, joins) == [[True, True]]


@pytest.mark.parametrize("autocast", [False, True])
def test_nothing_is_compiled_in_a_capture(monkeypatch: pytest.MonkeyPatch, autocast: bool) -> None:
    """Compiled code knows whether autocast keeps casts; to compile may wait for the device, which ends a capture."""
    compiled, captures = list[bool](), list[bool]()

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(bool(captures and captures[-1]))
        return graph.forward

    @contextmanager
    def capture(*_: Any, **__: Any) -> Iterator[None]:
        captures.append(True)
        yield
        captures.append(False)

    network = GELU(2, 2).requires_grad_(False)
    network.compile(backend=backend)
    monkeypatch.setattr(recorder, "device_module", lambda kind: Mock(graph=capture))
    monkeypatch.setattr(recorder, "untaken_fraction", lambda device: 1.0)
    monkeypatch.setattr(step_graphs, "every_rank_has", lambda mesh, where, here: here)
    graphs = StepGraphs(network, recorder.GraphRecorder(CPU, None), graphs_alone(network)._mesh)
    monkeypatch.setattr(StepGraphs, "_replayed", lambda self, graph, call, state: graph.recording.output)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for _ in range(2):
            graphs.run("exact", network, ((torch.ones(1, 2),), {}), Stateless())
    assert captures == [True, False], graphs.refused
    assert compiled == [False], "once, by the step before"


def test_later_arguments_are_written_where_the_first_are() -> None:
    x = torch.ones(2)
    static = StaticCall(((x, [x]), {"y": torch.zeros(2)}))
    (first, (again,)), kwargs = static.call
    assert first is again
    assert first is not x
    later = torch.full((2,), 3.0)
    static.take(((later, [later]), {"y": torch.ones(2)}))
    assert (first.tolist(), kwargs["y"].tolist()) == ([3.0, 3.0], [1.0, 1.0])
