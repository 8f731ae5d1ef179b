"""No key and no user can fill the queue for all others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from patchpar.errors import PlanError
from patchpar.serving.api_keys import ApiKeys
from patchpar.serving.http.application import application
from patchpar.serving.service import ImageService
from patchpar.serving.settings import ServerSettings
from tests.serving.fakes import FakeGenerator
from tests.serving.requests import PATH, client_of
from tests.serving.test_http import error_of

KEYS = "0123456789abcdef-one", "0123456789abcdef-two"
LATER = f"{PATH}?async=true"


@pytest.fixture
def clients(fake: FakeGenerator) -> Iterator[tuple[Any, Any]]:
    """Of two keys, behind a request that runs."""
    settings = ServerSettings(keys=ApiKeys.of(*KEYS), max_queue=20, max_per_key=3, max_per_user=2)
    service = ImageService(fake, settings)  # type: ignore[arg-type]
    service.load()
    app = application(service)
    fake.gate.clear()
    first, second = (client_of(app, key) for key in KEYS)
    first.post(LATER, json={"prompt": "runs"})
    assert fake.started.wait(20)
    yield first, second
    fake.gate.set()
    service.close()


def waits(client: Any, **fields: str) -> bool:
    """Whether a request may wait; one that may not is told so."""
    response = client.post(LATER, json={"prompt": "a", **fields})
    if response.status_code == 202:
        return True
    error = error_of(response, 429)
    assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
    assert int(response.headers["retry-after"]) >= 1
    return False


def test_a_key_has_so_many_and_others_have_their_own(clients: Any) -> None:
    first, second = clients
    assert [waits(first) for _ in range(4)] == [True, True, True, False]
    assert not waits(first, user="another"), "users are of a key"
    assert waits(second)


def test_a_user_of_a_key_has_so_many(clients: Any) -> None:
    first, second = clients
    assert [waits(first, user="ann") for _ in range(3)] == [True, True, False]
    assert not waits(first, safety_identifier="ann"), "its other name"
    assert waits(first, user="bob")
    assert waits(second, user="ann"), "of another key"


def test_bad_limits() -> None:
    for name in ("max_per_key", "max_per_user"):
        with pytest.raises(PlanError, match=f"--{name.replace('_', '-')} 0"):
            ServerSettings(**{name: 0})
