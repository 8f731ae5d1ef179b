"""LoRAs that requests select by name: each image is that of plain diffusers with the same adapters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import load_file, save_file

from patchpar import PlanError
from patchpar.serving.api_keys import ApiKeys
from patchpar.serving.generation import ImageGenerator
from patchpar.serving.http.application import application
from patchpar.serving.lora_registry import RegisteredLora
from patchpar.serving.service import ImageService
from patchpar.serving.settings import ServedModel, ServerSettings
from tests.serving.fakes import FakeGenerator
from tests.serving.requests import PATH, client_of, until
from tests.serving.test_http import error_of
from tests.serving.test_images import image_of
from tests.tiny import build

ADMIN = "0123456789abcdef-admin"
SMALL = {"prompt": "a small red house", "size": "128x128", "num_inference_steps": 2, "seed": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, two adapters beside it, and two of other models."""
    found = tmp_path_factory.mktemp("model")
    build("sdxl").pipe.save_pretrained(found)
    for seed, name in enumerate(("ink", "snow")):
        pipe = build("sdxl").pipe
        torch.manual_seed(seed)
        pipe.unet.add_adapter(LoraConfig(r=4, lora_alpha=4, init_lora_weights=False, target_modules=["to_q", "to_v"]))
        layers = get_peft_model_state_dict(pipe.unet)
        pipe.save_lora_weights(found, unet_lora_layers=layers, weight_name=f"{name}.safetensors")
    weights = load_file(found / "ink.safetensors")
    save_file({name.replace("unet", "transformer"): each for name, each in weights.items()}, found / "flux.safetensors")
    save_file({name: each.repeat(2, 2) for name, each in weights.items()}, found / "wide.safetensors")
    return found


@pytest.fixture(scope="module")
def tiny_service(folder: Path) -> Iterator[ImageService]:
    lora = RegisteredLora(name="ink", source=str(folder / "ink.safetensors"), scale=0.5)
    generator = ImageGenerator(ServedModel(model=str(folder), devices=("cpu",), loras=(lora,)))
    found = ImageService(generator, ServerSettings(admin_keys=ApiKeys.of(ADMIN)))
    found.load()
    yield found
    found.close()


@pytest.fixture(scope="module")
def plain(folder: Path) -> Any:
    """Plain diffusers, with both adapters loaded."""
    pipe = build("sdxl").pipe
    for name in ("ink", "snow"):
        pipe.load_lora_weights(folder, weight_name=f"{name}.safetensors", adapter_name=name)
    return pipe


def plain_image(pipe: Any, adapters: dict[str, float]) -> Any:
    pipe.enable_lora()
    if adapters:
        pipe.set_adapters(list(adapters), list(adapters.values()))
    else:
        pipe.disable_lora()
    call = {"prompt": SMALL["prompt"], "height": 128, "width": 128, "num_inference_steps": 2}
    return np.asarray(pipe(**call, generator=torch.Generator().manual_seed(3)).images[0]).astype(int)


def test_each_request_has_its_own(tiny_service: ImageService, folder: Path, plain: Any) -> None:
    """Also two at once, and none after some; what is registered meanwhile can be selected, until it is removed."""
    client, admin = client_of(application(tiny_service)), client_of(application(tiny_service), ADMIN)

    def differs(lora: list[dict[str, Any]], wanted: dict[str, float]) -> int:
        response = client.post(PATH, json={**SMALL, "lora": lora})
        assert response.status_code == 200, response.text
        found = image_of(response.json()["data"][0]["b64_json"]).astype(int)
        return int(np.abs(found - plain_image(plain, wanted)).max())

    assert differs([{"name": "ink"}], {"ink": 0.5}) <= 1
    assert differs([], {}) <= 1
    assert differs([{"name": "ink", "scale": 2.0}], {}) > 10, "a control: it is not the plain image"
    snow = {"name": "snow", "path": str(folder / "snow.safetensors")}
    assert admin.post("/admin/lora", json=snow).json()["data"][1] == {"name": "snow", "scale": 1.0}
    assert client.get("/v1/models").json()["data"][0]["adapters"] == ["ink", "snow"]
    assert differs([{"name": "snow"}], {"snow": 1.0}) <= 1
    assert differs([{"name": "ink", "scale": 2}, {"name": "snow", "scale": 0.3}], {"ink": 2.0, "snow": 0.3}) <= 1
    again = admin.post("/admin/lora", json=snow)
    assert "there is one of that name" in error_of(again, 400)["message"]
    assert [each["name"] for each in admin.delete("/admin/lora/snow").json()["data"]] == ["ink"]
    assert error_of(client.post(PATH, json={**SMALL, "lora": [{"name": "snow"}]}), 400)["code"] == "lora_not_found"
    assert differs([], {}) <= 1
    other = admin.post("/admin/lora", json={"name": "other", "path": str(folder / "unet")})
    assert "cannot be loaded" in error_of(other, 400)["message"]
    for name, reason in (("flux", "no weights for the networks of this model"), ("wide", "size mismatch")):
        path = str(folder / f"{name}.safetensors")
        assert reason in error_of(admin.post("/admin/lora", json={"name": name, "path": path}), 400)["message"]
    assert differs([{"name": "ink"}], {"ink": 0.5}) <= 1


class LoraPipeline:
    """Stands for a pipeline that loads adapters."""

    def __init__(self, description: Any) -> None:
        self.description, self.loaded = description, list[str]()

    def load_lora_weights(self, source: str, adapter_name: str, **options: Any) -> None:
        self.loaded.append(adapter_name)

    def get_list_adapters(self) -> dict[str, list[str]]:
        return {"unet": self.loaded}

    def disable_lora(self) -> None: ...

    def delete_adapters(self, name: str) -> None:
        self.loaded.remove(name)


@pytest.fixture
def registered(fake: FakeGenerator) -> FakeGenerator:
    """The fake generator with two LoRAs."""
    from dataclasses import replace

    pipe = LoraPipeline(replace(fake.description, methods=frozenset({"load_lora_weights"})))
    for name in ("ink", "snow"):
        fake.loras.load(RegisteredLora(name=name, source="org/name"), pipe)
    fake.pipe = pipe
    return fake


@pytest.mark.parametrize(
    ("lora", "param", "text"),
    [
        ([{"name": "inc"}], "lora.0.name", "did you mean 'ink'"),
        ([{"name": "zzz"}], "lora.0.name", "ink, snow"),
        ([{"name": "ink"}, {"name": "ink"}], "lora.1.name", "twice"),
        ([{"name": "ink", "scale": 11}], "lora.0.scale", "10"),
        ([{"name": "ink", "scale": "1"}], "lora.0.scale", "number"),
        ([{"name": "ink", "weight": 1}], "lora.0.weight", "no parameter"),
        ([{}], "lora.0.name", "missing"),
        ([{"name": "/etc/passwd"}], "lora.0.name", "not registered"),
        ("ink", "lora", "array"),
        ([{"name": "ink"}] * 9, "lora", "8"),
    ],
)
def test_what_is_refused(registered: Any, client: Any, lora: Any, param: str, text: str) -> None:
    error = error_of(client.post(PATH, json={"prompt": "a", "lora": lora}), 400)
    assert error["param"] == param
    assert text in error["message"]


def test_a_server_without_loras(client: Any, fake: FakeGenerator) -> None:
    error = error_of(client.post(PATH, json={"prompt": "a", "lora": [{"name": "ink"}]}), 400)
    assert (error["code"], "--lora" in error["message"]) == ("lora_not_found", True)
    assert client.post(PATH, json={"prompt": "a", "lora": []}).status_code == 200
    assert fake.calls[-1].loras == {}


def test_scales_reach_the_call(registered: Any, client: Any) -> None:
    asked = [{"name": "snow"}, {"name": "ink", "scale": -1.5}]
    assert client.post(PATH, json={"prompt": "a", "lora": asked}).status_code == 200
    assert registered.calls[-1].loras == {"snow": 1.0, "ink": -1.5}


def test_a_form_has_them_as_json() -> None:
    from patchpar.serving.image_request import parse_edit
    from patchpar.serving.request_error import RequestError

    found = parse_edit({"prompt": "a", "lora": json.dumps([{"name": "ink", "scale": 0.8}])})
    assert found.lora is not None
    assert (found.lora[0].name, found.lora[0].scale) == ("ink", 0.8)
    half = '[{"name": "\\ud800"}]'  # of an emoji that was cut in two
    for text, param in (("ink", "lora"), ("[" * 5000, "lora"), (half, "lora"), ('[{"nam": "ink"}]', "lora.0.nam")):
        with pytest.raises(RequestError) as raised:
            parse_edit({"prompt": "a", "lora": text})
        assert raised.value.param == param


def test_a_lora_that_is_removed_while_a_request_waits_for_it(registered: Any, fake: Any, service_of: Any) -> None:
    client, admin, service = service_of
    fake.gate.clear()
    first = client.post(f"{PATH}?async=true", json={"prompt": "a"}).json()["id"]
    assert fake.started.wait(20)
    late = client.post(f"{PATH}?async=true", json={"prompt": "b", "lora": [{"name": "ink"}]}).json()["id"]
    with ThreadPoolExecutor(1) as pool:
        removed = pool.submit(admin.delete, "/admin/lora/ink")
        until(lambda: service.waiting == 2, "the removal to be asked for")
        fake.gate.set()
        assert removed.result(20).status_code == 200
    assert admin.delete("/admin/lora/ink").status_code == 404
    until(lambda: client.get(f"/v1/jobs/{first}").json()["status"] == "completed", "the first")
    until(lambda: client.get(f"/v1/jobs/{late}").json()["status"] in ("completed", "failed"), "the late one")
    assert fake.pipe.loaded == ["snow"]
    assert client.get(f"/v1/jobs/{late}").json()["error"]["code"] == "lora_not_found"


def test_what_cannot_be_done_is_refused_while_others_run(
    registered: Any, fake: Any, service_of: Any, tmp_path: Path
) -> None:
    """Else requests would wait until all that runs has ended, for nothing."""
    client, admin, _ = service_of
    fake.gate.clear()
    client.post(f"{PATH}?async=true", json={"prompt": "a"})
    assert fake.started.wait(20)
    with ThreadPoolExecutor(2) as pool:
        unknown = pool.submit(admin.delete, "/admin/lora/inc")
        taken = pool.submit(admin.post, "/admin/lora", json={"name": "ink", "path": str(tmp_path)})
        found = wait((unknown, taken), 20)
        fake.gate.set()
    assert not found.not_done
    assert "'ink'" in error_of(unknown.result(), 404)["message"]
    assert "there is one of that name" in error_of(taken.result(), 400)["message"]


@pytest.fixture
def service_of(fake: Any) -> Iterator[Any]:
    found = ImageService(fake, ServerSettings(admin_keys=ApiKeys.of(ADMIN)))
    found.load()
    app = application(found)
    yield client_of(app), client_of(app, ADMIN), found
    fake.gate.set()
    found.close()


def test_names_of_loras() -> None:
    for name in ("", "a b", "a.b", "a/b", "a" * 65):
        with pytest.raises(PlanError, match="letters"):
            RegisteredLora(name=name, source="x")
    with pytest.raises(PlanError, match="scale"):
        RegisteredLora(name="a", source="x", scale=float("nan"))
    one = RegisteredLora(name="a", source="x")
    with pytest.raises(PlanError, match="name of its own"):
        ServedModel(model="m", devices=("cpu",), loras=(one, one))
