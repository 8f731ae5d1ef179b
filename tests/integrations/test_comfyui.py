"""The nodes for ComfyUI, against stand-ins of what they use of it."""

from __future__ import annotations

import asyncio
import base64
import importlib
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
import torch
from PIL import EpsImagePlugin, Image, UnidentifiedImageError

from patchpar import PlanError
from patchpar.pipeline.job_progress import JobProgress
from patchpar.serving.http.application import application
from patchpar.serving.service import ImageService
from patchpar.serving.settings import ServerSettings
from tests.breadth import first_of
from tests.integrations import comfy
from tests.modules.networks import NETWORKS, call_of, network
from tests.serving.fakes import FakeGenerator
from tests.serving.requests import HOME, client_of
from tests.tensors import relative

LIMIT = 7e-7


class Nodes(SimpleNamespace):
    """The modules of the nodes, the progress they report, and whether the user interrupts."""


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    found = Nodes(progress=[], interrupts=False)

    def check() -> None:
        if found.interrupts:
            raise comfy.Interrupted

    for name, module in comfy.modules(3, check, found.progress).items():
        monkeypatch.setitem(sys.modules, name, module)
    comfy.forget()
    found.pack = importlib.import_module("integrations.comfyui")
    found.nodes, found.parallel, found.generate = (
        importlib.import_module(f"integrations.comfyui.{name}") for name in ("nodes", "parallel", "generate")
    )
    yield found
    comfy.forget()


@pytest.mark.parametrize("name", first_of(NETWORKS, "unet"))
def test_a_model_is_split_with_its_loras_and_wrappers(
    nodes: Nodes, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        nodes.nodes, "TeamSettings", lambda **given: nodes.parallel.TeamSettings(**given, verify=tmp_path)
    )
    asked = []

    def other(executor: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(executor.class_obj)
        return executor(*args, **kwargs) * 2

    plain = comfy.ModelPatcher(network(name))
    plain.add_wrapper_with_key("diffusion_model", "before", other)
    (split,) = nodes.nodes.PatchparParallel.execute(plain, gpus=2, strategy="exact", split="auto")
    weight = next(each for each, x in plain.model.diffusion_model.named_parameters() if x.ndim > 1)
    for patcher in (plain, split):
        patcher.add_patch(weight, 1.5)  # by a node behind ours
        patcher.add_wrapper_with_key("diffusion_model", "behind", other)
    calls = [call_of(name, step) for step in range(2)]
    want = comfy.Guider(plain).sample(calls)
    asked.clear()
    got = comfy.Guider(split).sample(calls)
    assert max(relative(x, y) for x, y in zip(got, want, strict=True)) <= LIMIT
    copies = [each.model.diffusion_model for each in split.additional_models["patchpar"]]
    assert asked.count(copies[0]) >= 2  # the wrapper behind ours runs with each copy, also in comparisons
    assert split.model.diffusion_model is plain.model.diffusion_model
    assert not [each for each in copies[0].modules() if getattr(each, "_diffusers_hook", None)]


def test_what_cannot_be_split_is_refused(nodes: Nodes) -> None:
    model = comfy.ModelPatcher(network("wan"))
    assert nodes.nodes.PatchparParallel.execute(model, gpus=1, strategy="exact", split="auto") == (model,)
    with pytest.raises(ValueError, match="gpus=4, but this machine has 3: use 3 at most"):
        nodes.nodes.PatchparParallel.execute(model, gpus=4, strategy="exact", split="auto")
    with pytest.raises(PlanError, match=r"cannot copy a model to another GPU .*: update it"):
        nodes.nodes.PatchparParallel.execute(SimpleNamespace(), gpus=2, strategy="exact", split="auto")
    (split,) = nodes.nodes.PatchparParallel.execute(model, gpus=2, strategy="exact", split="auto")
    split.set_additional_models("multigpu", [model])  # by a node behind ours
    with pytest.raises(PlanError, match="ComfyUI splits this model over GPUs by itself"):
        comfy.Guider(split).sample([])


def test_a_sampling_inside_of_another_leaves_the_outer_one_split(nodes: Nodes) -> None:
    team, seen = nodes.parallel.ModelTeam(nodes.parallel.TeamSettings()), []
    model = comfy.ModelPatcher(torch.nn.Linear(1, 1))
    model.set_additional_models("patchpar", [comfy.ModelPatcher(torch.nn.Linear(1, 1))])
    guider = SimpleNamespace(model_patcher=model)

    def sampling(inner: Any) -> None:
        if inner is not None:
            comfy.Executor(sampling, guider, [team.sample]).execute(None)
        seen.append(len(team._copies))

    comfy.Executor(sampling, guider, [team.sample]).execute("inner")
    assert seen == [1, 1]
    assert team._copies == []


class Dropped:
    """As a pipeline: it refers to itself, and its workers end with it."""

    def __init__(self, ends: list[str]) -> None:
        self.itself = self
        weakref.finalize(self, ends.append, "ended")


def test_workers_of_a_dropped_pipeline_end_before_another_is_loaded(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[str] = []
    loaded = SimpleNamespace(from_pretrained=lambda *_, **__: list(ends))
    monkeypatch.setattr("patchpar.ParallelPipeline", loaded, raising=False)
    Dropped(ends)
    (found,) = nodes.nodes.PatchparPipeline.execute("embedded", devices=2, plan="auto", dtype="float16")
    assert found == ["ended"]


class Job:
    """A job of two steps that ends when it has been looked at so often."""

    def __init__(self, looks: int) -> None:
        self.left, self.cancelled = looks, False
        self.progress = JobProgress(step=0, steps=0)

    def wait(self, timeout: float) -> bool:
        self.left -= 1
        self.progress = JobProgress(step=2 - min(self.left, 2), steps=2)
        return self.left < 0

    def cancel(self) -> None:
        self.cancelled = True

    def result(self) -> Any:
        return SimpleNamespace(images=[Image.new("RGB", (16, 8), (255, 0, 51))])


def test_a_pipeline_gives_images_and_progress_and_is_interrupted(nodes: Nodes) -> None:
    job, calls = Job(3), []
    pipe = SimpleNamespace(submit=lambda **call: calls.append(call) or job)
    call = {"prompt": "a house", "width": 16, "height": 8, "steps": 2, "seed": 7, "guidance": 5.0}
    (images,) = nodes.nodes.PatchparGenerate.execute(pipe, **call)
    assert images.shape == (1, 8, 16, 3)
    assert images[0, 0, 0].tolist() == pytest.approx([1.0, 0.0, 0.2])
    assert nodes.progress == [(0, 2), (1, 2), (2, 2)]
    assert calls[0]["num_inference_steps"] == 2
    assert calls[0]["generator"].initial_seed() == 7
    nodes.interrupts, job = True, Job(3)
    with pytest.raises(comfy.Interrupted):
        nodes.nodes.PatchparGenerate.execute(pipe, **call)
    assert job.cancelled


@pytest.fixture
def served() -> Iterator[Any]:
    """A server of a fake model: the generator, OpenAI's client of it, and the server's own routes."""
    fake: Any = FakeGenerator()
    service = ImageService(fake, ServerSettings())
    service.load()
    http = client_of(application(service))
    yield fake, openai.OpenAI(base_url=f"{HOME}/v1", api_key="none", http_client=http), http
    fake.gate.set()
    service.close()


CALL = {"prompt": "a house", "size": "64x128", "n": 2}
EXTRA = {"seed": 1, "num_inference_steps": 3}


def test_a_server_makes_the_images_and_keeps_nothing(nodes: Nodes, served: Any) -> None:
    fake, client, http = served
    images = nodes.generate.from_server(client, CALL, EXTRA, **nodes.nodes.reporting())
    assert images.shape == (2, 128, 64, 3)
    assert (fake.calls[0].seeds, fake.calls[0].arguments["num_inference_steps"]) == ((1, 2), 3)
    assert http.get("/v1/jobs").json()["data"] == []


def test_a_user_who_interrupts_ends_the_job_of_the_server(nodes: Nodes, served: Any) -> None:
    fake, client, http = served
    fake.gate.clear()
    nodes.interrupts = True
    with pytest.raises(comfy.Interrupted):
        nodes.generate.from_server(client, CALL, EXTRA, **nodes.nodes.reporting())
    assert http.get("/v1/jobs").json()["data"] == []
    nodes.interrupts = False
    fake.gate.set()
    assert len(nodes.generate.from_server(client, CALL, EXTRA, **nodes.nodes.reporting())) == 2


def test_a_job_that_fails_says_why(nodes: Nodes, served: Any) -> None:
    fake, client, _ = served
    fake.error = PlanError("this model has no such scheduler")
    with pytest.raises(RuntimeError, match="the server: this model has no such scheduler"):
        nodes.generate.from_server(client, CALL, EXTRA, **nodes.nodes.reporting())


def test_a_server_has_nothing_run(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A workflow of somebody else names the server, and Pillow gives PostScript to Ghostscript."""
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_, **__: pytest.fail("it was run"))
    program = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"
    job = {"status": "completed", "result": {"data": [{"b64_json": base64.b64encode(program).decode()}]}}
    client: Any = SimpleNamespace(
        images=SimpleNamespace(generate=lambda **_: SimpleNamespace(id="a")),
        get=lambda *_, **__: job,
        delete=lambda *_, **__: None,
        with_options=lambda **_: client,
    )
    with pytest.raises(UnidentifiedImageError):
        nodes.generate.from_server(client, CALL, EXTRA, **nodes.nodes.reporting())


def test_a_server_that_does_not_answer_is_named(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise openai.APIConnectionError(request=httpx.Request("GET", "http://nowhere"))

    monkeypatch.setattr(nodes.nodes, "from_server", refuse)
    given = {"prompt": "a house", "width": 64, "height": 64, "steps": 1, "seed": 0, "images": 1}
    with pytest.raises(ValueError, match=r"url='http://nowhere/v1' does not answer .*: run patchpar serve there"):
        nodes.nodes.PatchparRemote.execute("http://nowhere/v1", "", **given)


def test_a_workflow_does_not_choose_who_gets_a_file(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Workflows are passed on, and name a URL and a file: that of a key, or any other."""
    sent = []
    monkeypatch.setattr(nodes.nodes, "from_server", lambda client, *_, **__: sent.append(client.api_key))
    given = {"prompt": "a house", "width": 64, "height": 64, "steps": 1, "seed": 0, "images": 1}
    keys, other = tmp_path / "key", tmp_path / "id_rsa"
    keys.write_text("# http://gpu:8000/v1\nabcdefghijklmnop\n")
    other.write_text("PRIVATE\nof somebody\n")
    for file, url in ((keys, "http://evil.example/v1"), (other, "http://gpu:8000/v1")):
        with pytest.raises(ValueError, match=r"add the line `# http://.*/v1` to the file") as raised:
            nodes.nodes.PatchparRemote.execute(url, str(file), **given)
        assert "PRIVATE" not in str(raised.value)
    nodes.nodes.PatchparRemote.execute("http://gpu:8000/v1", str(keys), **given)
    assert sent == ["abcdefghijklmnop"]


def test_keys_and_pipelines_that_are_none(nodes: Nodes) -> None:
    url = "http://gpu:8000/v1"
    assert nodes.generate.key_in(f"# of the server\n#{url}/\n\n abc \nother\n", url) == "abc"
    with pytest.raises(ValueError, match="there is no key in it"):
        nodes.generate.key_in(f"# {url}\n", url)
    job = SimpleNamespace(wait=lambda _: True, result=lambda: SimpleNamespace(frames=[]))
    with pytest.raises(ValueError, match="this pipeline makes no images"):
        nodes.generate.from_pipeline(SimpleNamespace(submit=lambda: job), {}, **nodes.nodes.reporting())
    q = torch.zeros(1, 2, 4, 8)
    with pytest.raises(PlanError, match="fewer heads of keys than of queries"):
        nodes.parallel.torch_attention(None, q, q[:, :1], q[:, :1], 2, skip_reshape=True, enable_gqa=True)


def test_the_pack_is_what_comfyui_loads(nodes: Nodes) -> None:
    extension = asyncio.run(nodes.pack.comfy_entrypoint())
    found = asyncio.run(extension.get_node_list())
    schemas = [each.define_schema() for each in found]
    assert [each.node_id for each in schemas] == [each.__name__ for each in found]
    assert all(each.is_experimental for each in schemas)
    for schema in schemas:
        names = [each.name for each in schema.inputs]
        code = next(each for each in found if each.__name__ == schema.node_id).execute.__code__
        assert list(code.co_varnames[1 : code.co_argcount]) == names
