"""How many devices a request asks for, and how many steps its quality is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from patchpar.cli.serve import ServeFlags, _loras, _quality, _service
from patchpar.errors import PlanError
from patchpar.plan.plan import Plan
from patchpar.serving.http.application import application
from patchpar.serving.image_call import CallRules
from patchpar.serving.image_request import parse_request
from patchpar.serving.job import Job
from patchpar.serving.request_error import RequestError
from patchpar.serving.service import ImageService
from patchpar.serving.settings import RequestLimits, ServedModel, ServerSettings
from tests.serving.fakes import MODEL, FakeGenerator
from tests.serving.requests import PATH, client_of

FOUR = ("cpu",) * 4


class CountingGenerator(FakeGenerator):
    """Notes how many devices the queue gives to each request."""

    def __init__(self, served: ServedModel) -> None:
        super().__init__(served)
        self.taken: list[int] = []

    def generate(self, job: Job, call: Any) -> Any:
        self.taken.append(job.takes)
        return super().generate(job, call)


@pytest.fixture
def four() -> Iterator[tuple[Any, CountingGenerator]]:
    fake: Any = CountingGenerator(ServedModel(model="fake", devices=FOUR, quality_steps={"low": 8, "high": 30}))
    service = ImageService(fake, ServerSettings())
    service.load()
    yield client_of(application(service)), fake
    service.close()


def test_a_request_gets_the_devices_that_it_asks_for(four: Any) -> None:
    client, fake = four
    for degree in (1, 3, 4):
        assert client.post(PATH, json={"prompt": "a", "degree": degree}).status_code == 200
    assert client.post(PATH, json={"prompt": "a"}).status_code == 200
    assert fake.taken == [1, 3, 4, 4]
    strategy = {"prompt": "a", "degree": 2, "strategy": "displaced"}
    assert client.post(PATH, json=strategy).status_code == 200
    assert (fake.taken[-1], fake.calls[-1].plan.patch, fake.calls[-1].degree) == (2, 2, None)
    assert client.post(PATH, json={"prompt": "a", "degree": 5}).json()["error"]["param"] == "degree"


def test_a_plan_of_the_server_says_how_many() -> None:
    served = ServedModel(model="fake", devices=FOUR, plan=Plan(cfg=2))
    rules = CallRules(model=MODEL, served=served, limits=RequestLimits())
    with pytest.raises(RequestError, match=r"cfg=2.*add plan=auto"):
        rules.call_of(parse_request(b'{"prompt": "a", "degree": 3}'))
    call = rules.call_of(parse_request(b'{"prompt": "a", "degree": 3, "plan": "auto"}'))
    assert (call.degree, call.devices_of(served)) == (3, 3)


def test_a_strategy_needs_a_plan_beside_that_of_the_server() -> None:
    served = ServedModel(model="fake", devices=FOUR, plan=Plan(cfg=2, patch=2))
    rules = CallRules(model=MODEL, served=served, limits=RequestLimits())
    with pytest.raises(
        RequestError, match="strategy without plan: the server's plan is cfg=2,patch=2,strategy=exact; give both"
    ):
        rules.call_of(parse_request(b'{"prompt": "a", "strategy": "displaced"}'))
    body = b'{"prompt": "a", "strategy": "displaced", "plan": "patch=2"}'
    assert str(rules.call_of(parse_request(body)).plan) == "patch=2,strategy=displaced"


def test_a_model_without_a_size() -> None:
    """Of one size that is not known, and of one that has to be given."""
    sizes = ("height", "width")
    fixed = replace(MODEL, parameters={name: each for name, each in MODEL.parameters.items() if name not in sizes})
    for model, body, reason in (
        (fixed, b'{"prompt": "a", "size": "64x64"}', "this model makes images of one size: leave size out"),
        (replace(MODEL, default_size=None), b'{"prompt": "a"}', "this model has no size of its own: give size"),
    ):
        rules = CallRules(model=model, served=ServedModel(model="fake", devices=FOUR), limits=RequestLimits())
        with pytest.raises(RequestError, match=reason) as found:
            rules.call_of(parse_request(body))
        assert (found.value.param, found.value.code) == ("size", "invalid_size")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ink", "--lora ink: write NAME=PATH"),
        ("ink=", "write NAME=PATH"),
        ("a b=org/name", "LoRA 'a b': a name has letters, digits, - and _, 64 at most"),
        ("ink=org/name:11", "LoRA ink: scale 11: use -10 to 10"),
        ("ink=no.safetensors", "--lora no.safetensors: there is no such file or folder"),
    ],
)
def test_loras_of_the_command_line_that_are_none(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        _loras([text])


def test_loras_of_the_command_line() -> None:
    (found,) = _loras(["ink=org/name:0.5"])
    assert (found.name, found.source, found.scale) == ("ink", "org/name", 0.5)


def test_a_strategy_without_patches_is_refused_before_the_model_is_loaded() -> None:
    with pytest.raises(PlanError, match="with patch=1 are one: use patch=2 or more"):
        ServedModel(model="fake", devices=FOUR, plan=Plan(cfg=2, strategy="displaced"))
    assert ServedModel(model="fake", devices=FOUR, plan=Plan(strategy="structure")).plan == Plan(strategy="structure")


def test_a_plan_that_divides_weights_is_that_of_all_requests() -> None:
    """Also "auto" asks for another one: a server holds its weights as its own plan says."""
    served = ServedModel(model="fake", devices=FOUR, plan=Plan(patch=4, weights="sharded"))
    rules = CallRules(model=MODEL, served=served, limits=RequestLimits())
    for fields in (b'"plan": "auto"', b'"plan": "patch=2"', b'"strategy": "displaced"'):
        with pytest.raises(RequestError, match=r"divides weights, so that requests cannot have another"):
            rules.call_of(parse_request(b'{"prompt": "a", ' + fields + b"}"))
    assert rules.call_of(parse_request(b'{"prompt": "a"}')).plan_of(served) == served.plan


def test_quality_is_a_number_of_steps(four: Any) -> None:
    """Unless the request says the number itself. What is not used is named in a header."""
    client, fake = four
    for fields, steps, is_used in (
        ({"quality": "low"}, 8, True),
        ({"quality": "high"}, 30, True),
        ({"quality": "high", "num_inference_steps": 5}, 5, False),
        ({"quality": "medium"}, None, False),
    ):
        response = client.post(PATH, json={"prompt": "a", **fields})
        assert response.status_code == 200, response.text
        assert fake.calls[-1].arguments.get("num_inference_steps") == steps
        assert ("warning" not in response.headers) == is_used
        assert response.json()["quality"] == fields["quality"]


def test_the_name_is_a_hub_id_or_the_last_part_of_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However it is written: clients request the model by it, and the next server finds its journal by it."""
    (tmp_path / "models" / "sdxl").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    wanted = {"models/sdxl": "sdxl", "./models/sdxl/": "sdxl", "org/model": "org/model", "embedded": "embedded"}
    wanted |= {"./gone": "gone", "/a/models/gone": "gone", "~/gone": "gone"}  # a folder that is not there
    assert {each: ServedModel(model=each, devices=("cpu",)).name for each in wanted} == wanted
    monkeypatch.chdir(tmp_path / "models" / "sdxl")
    wanted = {".": "sdxl", "..": "models", "../sdxl": "sdxl", str(tmp_path / "models" / "sdxl"): "sdxl"}
    assert {each: ServedModel(model=each, devices=("cpu",)).name for each in wanted} == wanted
    with pytest.raises(PlanError, match="no valid path"):
        _ = ServedModel(model="~nobody-of-this-name/sdxl", devices=("cpu",)).name


def test_bad_flags() -> None:
    assert _quality(ServeFlags(model="m", quality="low=8, high=30")) == {"low": 8, "high": 30}
    assert _quality(ServeFlags(model="m")) == {}
    for text, reason in (
        ("low", "low=8,high=30"),
        ("low=x", "low=8,high=30"),
        ("low=151", "--max-steps"),
        (f"low={'9' * 5000}", "low=8,high=30"),
        ("low=8,low=9", "low twice: once is enough"),
    ):
        with pytest.raises(PlanError, match=reason):
            _quality(ServeFlags(model="m", quality=text))
    for wrong in ({"best": 8}, {"auto": 8}, {"low": 0}):
        with pytest.raises(PlanError, match="--quality"):
            ServedModel(model="m", devices=("cpu",), quality_steps=wrong)


def test_requests_of_one_call_by_a_number_or_automatically() -> None:
    batches = [_service(ServeFlags(model="embedded", devices="cpu", batch=text)).served.batch for text in ("1", "auto")]
    assert batches == [1, 8]
    for text, message in (("many", "use auto"), ("-1", "use auto"), ("33", "to 32"), ("0", "to 32")):
        with pytest.raises(PlanError, match=f"--batch {text}: .*{message}"):
            _service(ServeFlags(model="embedded", devices="cpu", batch=text))


def test_ranks_of_several_nodes_know_one_another_by_a_secret_file() -> None:
    service = _service(ServeFlags(model="embedded", devices="ray:2", secret_file=Path("my.secret")))
    assert service.served.options["secret_file"] == Path("my.secret")
    assert "trusted_network" not in service.served.options
    with pytest.raises(PlanError, match=r"--secret-file my\.secret: embedded-face is a streaming model"):
        _service(ServeFlags(model="embedded-face", secret_file=Path("my.secret")))
